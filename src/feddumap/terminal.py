"""What a person sees while something runs, and tables. On a terminal a live line; in a log plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from feddumap.api import Run

LOG_EVERY = 10.0  # seconds between two lines where there is no terminal

out = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
err = Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """A note to the user, apart from the output proper."""
    err.print(message, markup=False)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Sequence[str] = (),
    width: int | None = None,
) -> None:
    """A table with numbers, and the columns of `right`, to the right. Where no terminal says how wide it may
    be, it may have `width`."""
    cells = [[_cell(value) for value in row] for row in rows]
    shown = Table(title=title or None, title_justify="left", header_style="bold", show_header=any(columns))
    for index, column in enumerate(columns):
        numeric = column in right or (bool(cells) and all(_is_number(row[index]) for row in cells))
        shown.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        shown.add_row(*row)
    if width is None or out.is_terminal:
        out.print(shown)
    else:
        Console(file=out.file, width=width, highlight=False).print(shown)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(",", "").replace(".", "").replace("e-", "").isdigit()


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(48.2), duration(838), duration(15953)
    ('48.2 s', '13 min 58 s', '4 h 25 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def follow(run: Run, name: str = "") -> None:
    """Train a run to its end, showing round, accuracy, virtual clock and the time left."""
    if out.is_terminal:
        _follow_live(run, name)
    else:
        _follow_log(run, name)


class Pace:
    """Tells how far a piece of work is and, from its pace so far, how long it will take."""

    def __init__(self) -> None:
        self._what = ""
        self._began = 0.0
        self._first = self._last = 0

    def __call__(self, what: str, done: int, whole: int) -> str:
        now = time.monotonic()
        if what != self._what or done < self._last:
            self._what, self._began, self._first = what, now, done
        self._last = done
        if done == self._first:
            return f"{what} {done}/{whole}"
        left = (now - self._began) / (done - self._first) * (whole - done)
        return f"{what} {done}/{whole} · left {duration(left)}"


def _status(run: Run) -> str:
    last = next((record for record in reversed(run.records) if record["accuracy"] is not None), None)
    accuracy = f"accuracy {100 * last['accuracy']:5.1f} %" if last else "accuracy   -    "
    return f"{accuracy} · clock {duration(run.state.clock)}"


def _follow_live(run: Run, name: str) -> None:
    total = run.rounds
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, speed_estimate_period=600) as progress:
        start, pace = run.state.round, Pace()
        bar = progress.add_task(
            f"{name} round {start}/{total}".strip(), total=total, completed=start, status="starting"
        )

        def show(what: str, done: int, whole: int) -> None:
            if what == "devices":
                progress.update(bar, completed=run.state.round + done / (whole + 1))
            else:
                progress.update(bar, status=pace(what, done, whole))

        for record in run.iterate(show):
            number = record["round"] + 1
            label = f"{name} round {number}/{total}".strip()
            progress.update(bar, completed=number, description=label, status=_status(run))


def _follow_log(run: Run, name: str) -> None:
    total, began, first = run.rounds, time.monotonic(), run.state.round
    printed, pace = 0.0, Pace()

    def show(what: str, done: int, whole: int) -> None:
        nonlocal printed
        said = pace(what, done, whole)
        if what != "devices" and time.monotonic() - printed >= LOG_EVERY:
            printed = time.monotonic()
            out.print(f"{name} {said}".strip())

    for record in run.iterate(show):
        number, now = record["round"] + 1, time.monotonic()
        if number == first + 1 or number == total or now - printed >= LOG_EVERY:
            left = (now - began) / (number - first) * (total - number)
            label = f"{name} round {number}/{total}".strip()
            out.print(f"{label} · {_status(run)} · left {duration(left)}")
            printed = now


@contextmanager
def counting() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for work in named parts: yields a function of (what, done, total or 0)."""
    if not err.is_terminal:
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=None)
            progress.update(bars[what], completed=done, total=total or None)

        yield show


@contextmanager
def overall(total: int) -> Iterator[Callable[[int, str], None]]:
    """Progress of several things at once: yields a function of (done of the total, what to say of it)."""
    if err.is_terminal:
        columns = (BarColumn(bar_width=None), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=err, expand=True) as progress:
            bar = progress.add_task("", total=total)
            yield lambda done, said: progress.update(bar, completed=done, description=said)
        return
    printed = time.monotonic()

    def show(_: int, said: str) -> None:
        nonlocal printed
        if time.monotonic() - printed >= LOG_EVERY:
            printed = time.monotonic()
            say(said)

    yield show


def print_summary(summary: dict[str, Any]) -> None:
    """A run's summary as a small table."""
    accuracy = summary["accuracy"]
    rows = [
        ("rounds", f"{summary['rounds']:,}"),
        ("final accuracy", percent(accuracy["final"])),
        ("mean of the last 10", percent(accuracy["mean10"])),
        ("best, smoothed", percent(accuracy["best_smoothed"])),
        ("parameters", f"{summary['parameters']:,}"),
        ("multiply-adds", f"{summary['macs']:,}"),
        ("virtual clock", duration(summary["clock"])),
        ("wall time", duration(summary["wall"])),
    ]
    for target, reach in summary["targets"].items():
        when = f"round {reach['round']}, clock {duration(reach['clock'])}" if reach else "not reached"
        rows.append((f"reached {target}", when))
    title = f"{summary['method']} · {summary['model']} · {summary['dataset']}"
    table(title, ("", ""), rows)


def side_by_side(summaries: Sequence[dict[str, Any]]) -> None:
    """Runs beside each other, with the change of the last against the first."""

    def row(name: str, show: Callable[[Any], str], values: list[Any], change: bool = True) -> list[str]:
        known = change and None not in values
        shown = ["-" if value is None else show(value) for value in values]
        return [name, *shown, f"{values[-1] / values[0] - 1:+.0%}" if known else ""]

    def of(key: str) -> list[Any]:
        return [summary[key] for summary in summaries]

    rows = [
        row("final accuracy", percent, [each["final"] for each in of("accuracy")], change=False),
        row(
            "mean accuracy, last 10 rounds",
            percent,
            [each["mean10"] for each in of("accuracy")],
            change=False,
        ),
    ]
    for target in summaries[0]["targets"]:
        clocks = [(each[target] or {}).get("clock") for each in of("targets")]
        rows.append(row(f"virtual time to {percent(float(target))}", duration, clocks))
    rows += [
        row("virtual time in all", duration, of("clock")),
        row("parameters", "{:,}".format, of("parameters")),
        row("multiply-adds an image", "{:,}".format, of("macs")),
        row("sent to devices", megabytes, of("bytes_down")),
        row("sent by devices", megabytes, of("bytes_up")),
    ]
    table("", ["", *of("method"), "change"], rows)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
