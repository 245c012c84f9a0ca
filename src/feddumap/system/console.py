"""Messages, tables, units and progress bars; progress is plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from feddumap.errors import escape_controls
from feddumap.system import widths

STATUS_WIDTH = 72  # of what stands beside a bar
LOG_EVERY = 10.0  # seconds between progress lines where there is no terminal


class SafeConsole(Console):
    """A console that shows control characters in text as escapes, line by line: what is printed may quote
    files and messages of others."""

    def print(self, *objects: Any, **keys: Any) -> None:
        super().print(*(_lines(each) if isinstance(each, str) else each for each in objects), **keys)


def _lines(text: str) -> str:
    return "\n".join(escape_controls(line) for line in text.split("\n"))


out = SafeConsole(highlight=False)
out.soft_wrap = not out.is_terminal
err = SafeConsole(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """Print a message to stderr, in a terminal broken between words."""
    text = _lines(message)
    err.print(widths.wrapped(text, err.width) if err.is_terminal else text, markup=False)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Sequence[str] = (),
    width: int | None = None,
    optional: Sequence[str] = (),
) -> None:
    """Print a table. Numeric columns and those named in `right` are right-aligned. `width` is the width where
    stdout is not a terminal.

    Titles break between words only, numbers and the first column never. What does not fit continues in
    another table below, without the `optional` columns.
    """
    target = out if width is None or out.is_terminal else Console(file=out.file, width=width, highlight=False)
    cells = [[_cell(value) for value in row] for row in rows]
    parts = [_Column(name, [row[at] for row in cells], name in right) for at, name in enumerate(columns)]
    extents = [part.extent() for part in parts]
    extents[0] = widths.Extent(min(extents[0].most, target.width // 2), extents[0].most)
    chosen = widths.kept(extents, [at for at, name in enumerate(columns) if name in optional], target.width)
    for number, block in enumerate(widths.blocks(extents, chosen, target.width)):
        shares = widths.shared([extents[index] for index in block], target.width)
        target.print(_table("" if number else title, [parts[index] for index in block], shares))


def _table(title: str, columns: Sequence[_Column], shares: Sequence[int]) -> Table:
    named = any(column.title for column in columns)
    shown = Table(title=title or None, title_justify="left", header_style="bold", show_header=named)
    for column, share in zip(columns, shares, strict=True):
        justify: Literal["left", "right"] = "right" if column.right else "left"
        shown.add_column(column.title, justify=justify, overflow="fold", width=share)
    for row in zip(*(column.cells for column in columns), strict=True):
        shown.add_row(*row)
    return shown


class _Column:
    """A column of a table: title, cells, and whether they are aligned to the right and stay whole."""

    def __init__(self, title: str, cells: Sequence[str], right: bool) -> None:
        self.title, self.cells = title, cells
        self.right = right or (bool(cells) and all(map(_is_number, cells)))

    def extent(self) -> widths.Extent:
        plain = [Text.from_markup(cell).plain for cell in self.cells]
        return widths.extent(Text.from_markup(self.title).plain, plain, whole=self.right)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return _lines(str(value))


def _is_number(cell: str) -> bool:
    """
    >>> [_is_number(cell) for cell in ("1,024", "-36.5 %", "1.2e-05", "-", "500 of 500", "")]
    [True, True, True, True, False, False]
    """
    digits = cell.removesuffix(" %").lstrip("+-−").replace(",", "").replace(".", "").replace("e-", "")
    return cell == "-" or digits.isdigit()


def percent(value: float | None) -> str:
    """
    >>> percent(0.9123), percent(None)
    ('91.2 %', '-')
    """
    return "-" if value is None else f"{100 * value:.1f} %"


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "round"), plural(2_000, "round"), plural(2, "series")
    ('1 round', '2,000 rounds', '2 series')
    """
    return f"{count:,} {noun}{'' if count == 1 or noun.endswith('s') else 's'}"


def span(low: float, high: float, form: str = ",") -> str:
    """A range of numbers, or the number if all are the same.

    >>> span(5_000, 6_000), span(5_000, 5_000), span(0.4406, 0.4411, ".3f")
    ('5,000 to 6,000', '5,000', '0.441')
    """
    first, last = format(low, form), format(high, form)
    return first if first == last else f"{first} to {last}"


def metric_prefix(value: float) -> tuple[float, str]:
    """The largest metric prefix that does not exceed a value, as factor and letter.

    >>> metric_prefix(950), metric_prefix(61_706), metric_prefix(9_750_922)
    ((1.0, ''), (1000.0, 'k'), (1000000.0, 'M'))
    """
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return factor, letter
    return 1.0, ""


def metric(value: float, unit: str = "", deviation: float | None = None) -> str:
    """A large number with a metric prefix, and its standard deviation unless that is None or 0.

    >>> metric(950), metric(61_706), metric(9_750_922), metric(153_293_824), metric(37_200_000, "B")
    ('950', '61.7 k', '9.75 M', '153 M', '37.2 MB')
    >>> metric(9_750_922.5, deviation=12_000.0)
    '9.75 ± 0.01 M'
    """
    factor, letter = metric_prefix(value)
    scaled = value / factor
    digits = 0 if factor == 1 or scaled >= 100 else 1 if scaled >= 10 else 2
    spread = f" ± {deviation / factor:.{digits}f}" if deviation else ""
    return f"{scaled:.{digits}f}{spread} {letter}{unit}".rstrip()


def byte_size(count: int) -> str:
    """
    >>> byte_size(37_200_000)
    '37.2 MB'
    """
    return metric(count, "B")


def duration(seconds: float) -> str:
    """

    >>> duration(48.2), duration(838), duration(15953)
    ('48.2 s', '13 min 58 s', '4 h 25 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def bar_width(screen: Console) -> int:
    """The width of a bar that has a status beside it."""
    return min(40, max(4, screen.width - STATUS_WIDTH))


class StatusColumn(ProgressColumn):
    """The field `status` of a task: the only text that is shortened where the terminal is narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["status"], no_wrap=True, overflow="ellipsis")


class Pace:
    """Formats the progress of a task and the time left, estimated from its pace so far."""

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
    """A progress bar for each named part of a task: yields a function of (part, done, total or 0)."""
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
    """One progress bar for several tasks: yields a function of (done, status text)."""
    if err.is_terminal:
        elapsed = (TextColumn("elapsed"), TimeElapsedColumn(table_column=Column(no_wrap=True)))
        columns = (BarColumn(bar_width=bar_width(err)), StatusColumn(), *elapsed)
        with Progress(*columns, console=err) as progress:
            bar = progress.add_task("", total=total, status="")
            yield lambda done, said: progress.update(bar, completed=done, status=said)
        return
    printed = time.monotonic()

    def show(_: int, said: str) -> None:
        nonlocal printed
        if time.monotonic() - printed >= LOG_EVERY:
            printed = time.monotonic()
            say(said)

    yield show
