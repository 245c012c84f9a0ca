"""Progress display and summary tables of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from feddumap.run import Run
from feddumap.runs.inspect import devices_text
from feddumap.system import console


def follow(run: Run, name: str = "") -> None:
    """Train a run to the end and show round, accuracy, virtual clock and estimated time left. Of a finished
    run only the end is made up for, if it was interrupted there."""
    if run.finished:
        for _ in run.iterate():
            pass
    elif console.out.is_terminal:
        _follow_live(run, name)
    else:
        _follow_log(run, name)


def _label(name: str, rounds: int, total: int) -> str:
    return f"{name} round {rounds}/{total}".strip()


def _status(run: Run) -> str:
    last = next((record for record in reversed(run.records) if record["accuracy"] is not None), None)
    accuracy = f"accuracy {100 * last['accuracy']:5.1f} %" if last else "accuracy   -    "
    return f"{accuracy} · clock {console.duration(run.state.clock)}"


def _follow_live(run: Run, name: str) -> None:
    total, start = run.rounds, run.state.round
    screen = console.err if console.err.is_terminal else console.out  # notes go to stderr, above the bar
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=console.bar_width(screen)),
        console.StatusColumn(),
        TextColumn("left"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=screen, speed_estimate_period=600) as progress:
        bar = progress.add_task(_label(name, start, total), total=total, completed=start, status="starting")

        def show(what: str, done: int, whole: int) -> None:
            if what == "devices":
                progress.update(bar, completed=run.state.round + done / (whole + 1))
            else:
                progress.update(bar, status=f"{what} {done}/{whole}")

        for record in run.iterate(show):
            number = record["round"] + 1
            progress.update(
                bar, completed=number, description=_label(name, number, total), status=_status(run)
            )


def _follow_log(run: Run, name: str) -> None:
    total, began, first = run.rounds, time.monotonic(), run.state.round
    printed, pace = 0.0, console.Pace()

    def show(what: str, done: int, whole: int) -> None:
        nonlocal printed
        text = pace(what, done, whole)
        if what != "devices" and time.monotonic() - printed >= console.LOG_EVERY:
            printed = time.monotonic()
            console.out.print(f"{name} {text}".strip())

    for record in run.iterate(show):
        number, now = record["round"] + 1, time.monotonic()
        if number == first + 1 or number == total or now - printed >= console.LOG_EVERY:
            left = (now - began) / (number - first) * (total - number)
            label = _label(name, number, total)
            console.out.print(f"{label} · {_status(run)} · left {console.duration(left)}")
            printed = now


def print_summary(summary: dict[str, Any]) -> None:
    """Print the summary of a run as a table."""
    accuracy, devices = summary["accuracy"], summary.get("device_accuracy")
    rows = [
        ("rounds", f"{summary['rounds']:,}"),
        ("final accuracy", console.percent(accuracy["final"])),
        ("mean of the last 10", console.percent(accuracy["mean10"])),
        ("best, smoothed", console.percent(accuracy["best_smoothed"])),
        *([("accuracy of devices", devices_text(devices))] if devices else []),
        ("parameters", f"{summary['parameters']:,}"),
        ("multiply-adds", f"{summary['macs']:,}"),
        ("virtual clock", console.duration(summary["clock"])),
        ("wall time", console.duration(summary["wall"])),
    ]
    for target, reach in summary["targets"].items():
        when = f"round {reach['round']}, clock {console.duration(reach['clock'])}" if reach else "not reached"
        rows.append((f"reached {target}", when))
    title = f"{summary['method']} · {summary['model']} · {summary['dataset']}"
    console.table(title, ("", ""), rows)


def side_by_side(summaries: Sequence[dict[str, Any]]) -> None:
    """Print a table of several runs, with changes against the first."""

    def cell(show: Callable[[Any], str], value: Any, first: Any, change: bool) -> str:
        if value is None:
            return "-"
        return f"{show(value)} ({value / first - 1:+.0%})" if change and first else show(value)

    def row(name: str, show: Callable[[Any], str], values: list[Any], change: bool = True) -> list[str]:
        first, *others = values
        return [name, cell(show, first, None, change), *(cell(show, each, first, change) for each in others)]

    def of(key: str) -> list[Any]:
        return [summary[key] for summary in summaries]

    rows = [
        row("final accuracy", console.percent, [each["final"] for each in of("accuracy")], change=False),
        row(
            "mean accuracy, last 10 rounds",
            console.percent,
            [each["mean10"] for each in of("accuracy")],
            change=False,
        ),
    ]
    for target in summaries[0]["targets"]:
        clocks = [(each[target] or {}).get("clock") for each in of("targets")]
        rows.append(row(f"virtual time to {console.percent(float(target))}", console.duration, clocks))
    rows += [
        row("total virtual time", console.duration, of("clock")),
        row("parameters", "{:,}".format, of("parameters")),
        row("multiply-adds per image", "{:,}".format, of("macs")),
        row("sent to devices", console.byte_size, of("bytes_down")),
        row("sent by devices", console.byte_size, of("bytes_up")),
    ]
    console.table("", ["", *of("method")], rows)
