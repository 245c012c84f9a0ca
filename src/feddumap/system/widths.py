"""How tables and sentences fit into the width of a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

LONGEST_WORD = 24  # columns; longer words, such as paths, may be broken
_COMMAND = re.compile(r"`[^`\n]*`|(?<=: )feddumap .*$", re.MULTILINE)


@dataclass(frozen=True)
class Extent:
    """The least and the greatest useful width of a column."""

    least: int
    most: int


def extent(title: str, cells: Iterable[str], whole: bool) -> Extent:
    """The extent of a column: its title breaks between words only, and so do its cells unless they stay
    `whole`.

    >>> extent("virtual time", ["12.5 s", "3 min 31 s"], whole=True)
    Extent(least=10, most=12)
    >>> extent("what it is", ["a data set"], whole=False)
    Extent(least=4, most=10)
    """
    lines = [line for cell in cells for line in cell.split("\n")]
    words = [word for line in lines for word in line.split()]
    parts = max((cell_len(each) for each in (lines if whole else words)), default=0)
    least = max(parts if whole else min(parts, LONGEST_WORD), *map(cell_len, title.split() or [""]))
    return Extent(least, max(least, *map(cell_len, [title, *lines])))


def kept(extents: Sequence[Extent], optional: Collection[int], width: int) -> list[int]:
    """The columns without the last optional ones, where all together are wider than `width`.

    >>> kept([Extent(9, 9), Extent(9, 20), Extent(9, 9)], {1, 2}, 30)
    [0, 1]
    """
    shown = list(range(len(extents)))
    for index in sorted(optional, reverse=True):
        if _outer([extents[each].least for each in shown]) > width:
            shown.remove(index)
    return shown


def blocks(extents: Sequence[Extent], columns: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each of the tables, one below the other, that show all columns beside the first one.

    >>> blocks([Extent(9, 9)] * 4, range(4), 37)
    [[0, 1, 2], [0, 3]]
    """
    first, *others = columns
    found = [[first]]
    for index in others:
        if len(found[-1]) > 1 and _outer([extents[each].least for each in [*found[-1], index]]) > width:
            found.append([first])
        found[-1].append(index)
    return found


def shared(extents: Sequence[Extent], width: int) -> list[int]:
    """The widths of the columns of one table: the widest ones are narrowed until the table fits.

    >>> shared([Extent(5, 5), Extent(4, 30), Extent(4, 10)], 40)
    [5, 15, 10]
    """
    widths = [each.most for each in extents]
    while _outer(widths) > width:
        room = [index for index, each in enumerate(extents) if widths[index] > each.least]
        if not room:
            break
        widths[max(room, key=widths.__getitem__)] -= 1
    return widths


def _outer(widths: Sequence[int]) -> int:
    """The width of a table: a column has a space on both sides and a line on its left."""
    return sum(widths) + 3 * len(widths) + 1


def wrapped(text: str, width: int) -> str:
    """Text in lines of at most `width`, broken between words but not within a command, which can be copied.

    >>> print(wrapped("it is there already: resume it with `feddumap resume a b`", 30))
    it is there already: resume it
    with `feddumap resume a b`
    >>> print(wrapped("it stopped; resume with: feddumap resume runs/first", 30))
    it stopped; resume with:
    feddumap resume runs/first
    """
    joined = _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), text)
    lines = [_filled(line, width) for line in joined.split("\n")]
    return "\n".join(lines).replace("\0", " ")


def _filled(line: str, width: int) -> str:
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
