"""Messages, tables and progress bars: live on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

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


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
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
def total_progress(total: int) -> Iterator[Callable[[int, str], None]]:
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


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
