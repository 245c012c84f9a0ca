"""Progress, remaining time and results of the cells of a grid."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from feddumap.methods.idle import unreached
from feddumap.runs.reader import read_config, read_records
from feddumap.runs.summary import finished, read_summary
from feddumap.sweep.grid import Cell
from feddumap.sweep.jobs import processes_of, train_cells
from feddumap.sweep.overhead import Overhead
from feddumap.system import console
from feddumap.system.console import byte_size, duration, metric, percent, plural

WIDTH = 120  # of tables where there is no terminal


@dataclass(frozen=True)
class CellState:
    """Progress of a cell: `pace` is the core seconds per round, None before the first round, `wall` the
    seconds of all rounds."""

    status: Literal["new", "interrupted", "finished"]
    done: int = 0
    pace: float | None = None
    wall: float = 0.0


def summary_of(cell: Cell) -> dict[str, Any] | None:
    """The summary of a finished cell, else None."""
    there = (cell.path / "config.toml").is_file()
    return read_summary(cell.path) if there and finished(cell.path) else None


def read_state(cell: Cell) -> CellState:
    """The state of a cell, read from its directory."""
    if not (cell.path / "config.toml").is_file():
        return CellState("new")
    records = read_records(cell.path)
    status: Literal["finished", "interrupted"] = "finished" if summary_of(cell) else "interrupted"
    if not records:
        return CellState(status)
    lanes, wall = processes_of(read_config(cell.path)), records[-1]["wall"]
    return CellState(status, len(records), wall * lanes / len(records), wall)


def time_left(
    plan: Sequence[tuple[Cell, CellState]], jobs: int, overhead: float = 0.0, started: Collection[str] = ()
) -> tuple[float, list[str]]:
    """Estimated seconds until all cells are finished with `jobs` at a time, and the kinds of cells without
    any trained round, whose rounds the estimate leaves out. Cells that have not `started` take `overhead`
    besides their rounds."""
    paces: dict[str, list[float]] = {}
    for cell, state in plan:
        if state.pace is not None:
            paces.setdefault(cell.kind, []).append(state.pace)
    work, unknown = [0.0], dict[str, None]()
    for cell, state in plan:
        if state.status == "finished":
            continue
        seconds = 0.0 if cell.name in started else overhead
        if cell.kind in paces:
            rounds = (cell.rounds - state.done) * (state.pace or median(paces[cell.kind]))
            seconds += rounds / processes_of(cell.config, jobs)
        else:
            unknown[cell.kind] = None
        work.append(seconds)
    return max(sum(work) / jobs, max(work)), list(unknown)


def train(cells: Sequence[Cell], jobs: int) -> dict[str, str]:
    """Train the unfinished cells, showing progress; returns error messages by cell name."""
    states = {cell.name: read_state(cell) for cell in cells}
    pending = [cell for cell in cells if states[cell.name].status != "finished"]
    jobs = max(1, min(jobs, len(pending)))
    going = {cell.name: cell for cell in pending}
    before = {cell.name: states[cell.name].wall for cell in pending}
    overhead = Overhead(list(going), jobs, time.monotonic())
    failures: dict[str, str] = {}
    total = sum(cell.rounds for cell in pending)

    def tick() -> None:
        for name, cell in going.items():
            states[name] = read_state(cell)
            overhead.trained(name, states[name].wall - before[name], time.monotonic())
        done = sum(states[cell.name].done if cell.name in going else cell.rounds for cell in pending)
        left = _left(
            [(cell, states[cell.name]) for cell in cells if cell.name not in failures], jobs, overhead
        )
        show(done, f"cells {len(pending) - len(going)}/{len(pending)} · rounds {done}/{total} · {left}")

    def ended(cell: Cell, error: str | None) -> None:
        del going[cell.name]
        states[cell.name] = read_state(cell)
        overhead.ended(cell.name, states[cell.name].wall - before[cell.name], time.monotonic())
        if error:
            failures[cell.name] = error
            console.say(f"{cell.name} failed: {error}")
        elif summary := summary_of(cell):
            accuracy, rounds = percent(summary["accuracy"]["final"]), plural(summary["rounds"], "round")
            took = duration(summary["wall"])
            console.say(f"{cell.name}: accuracy {accuracy} after {rounds} in {took}")
        tick()

    if pending:
        with console.total_progress(total) as show:
            tick()
            train_cells(pending, jobs, tick, ended)
    return failures


def _left(plan: Sequence[tuple[Cell, CellState]], jobs: int, overhead: Overhead) -> str:
    seconds, unknown = time_left(plan, jobs, overhead.mean() or 0.0, overhead.started)
    if unknown or overhead.mean() is None:
        return f"left at least {duration(seconds)}" if seconds else "left: unknown"
    return f"left {duration(seconds)}"


def say_never_reached(cells: Sequence[Cell]) -> None:
    """Say what methods can never do in so few rounds, once for all cells, and which methods."""
    methods: dict[str, dict[str, None]] = {}
    for cell in cells:
        for sentence in unreached(cell.config):
            methods.setdefault(sentence, {})[cell.config.method.name] = None
    for sentence, names in methods.items():
        console.say(f"{sentence} ({', '.join(names)})")


def plan(cells: Sequence[Cell], jobs: int) -> dict[str, Any]:
    """The cells to train, their states and the estimated time."""
    states = [(cell, read_state(cell)) for cell in cells]
    jobs = max(1, min(jobs, sum(state.status != "finished" for _, state in states)))
    seconds, unknown = time_left(states, jobs)
    rows = [
        {"cell": cell.name, "state": state.status, "done": state.done, "rounds": cell.rounds}
        for cell, state in states
    ]
    return {"cells": rows, "jobs": jobs, "seconds": seconds, "no_pace_yet": unknown}


def show_plan(value: dict[str, Any]) -> None:
    """Print the cells, their states and the estimated time."""
    rows = []
    for row in value["cells"]:
        at = f" at round {row['done']}/{row['rounds']}" if row["state"] == "interrupted" else ""
        rows.append((row["cell"], row["state"] + at, row["rounds"]))
    console.table("", ("cell", "state", "rounds"), rows)
    states = [row["state"] for row in value["cells"]]
    counts = [f"{states.count(each)} {each}" for each in ("finished", "interrupted", "new") if each in states]
    said = f"{len(states)} cells: {', '.join(counts)}"
    if value["seconds"]:
        about = "at least" if value["no_pace_yet"] else "about"
        said += f"; {about} {duration(value['seconds'])} of training left"
    if value["no_pace_yet"]:
        said += f"; no estimate for {', '.join(value['no_pace_yet'])} before a first round is trained"
    console.out.print(f"{said}.", markup=False)


def results(cells: Sequence[Cell], failures: dict[str, str]) -> list[dict[str, Any]]:
    """A dictionary per cell: directory, swept values, error and summary."""
    return [
        {
            "cell": cell.name,
            "directory": str(cell.path),
            "swept": dict(cell.swept),
            "error": failures.get(cell.name),
            **(summary_of(cell) or {}),
        }
        for cell in cells
    ]


def show_results(rows: Sequence[dict[str, Any]]) -> None:
    """Print the results, one row per cell. A narrow terminal leaves out the last columns."""
    only_methods = all(list(row["swept"]) == ["method.name"] for row in rows)
    columns = ("accuracy", "last 10", "virtual time", "parameters", "MACs", "down", "up", "wall time")
    shown = []
    for row in rows:
        cells = (
            [None] * len(columns)
            if "accuracy" not in row
            else [
                percent(row["accuracy"]["final"]),
                percent(row["accuracy"]["mean10"]),
                duration(row["clock"]),
                *(metric(row[key]) for key in ("parameters", "macs")),
                *(byte_size(row[key]) for key in ("bytes_down", "bytes_up")),
                duration(row["wall"]),
            ]
        )
        shown.append([row["cell"], *cells])
    first = "method" if only_methods else "cell"
    console.table("", (first, *columns), shown, right=columns, width=WIDTH, optional=columns[2:])
