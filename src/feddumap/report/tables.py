"""Tables rendered for a terminal or as Markdown, CSV, LaTeX and JSON.

A `Document` holds tables, notes and the data for JSON. A cell has a text and plain values for CSV, so that
"91.3 ± 0.4" is one column of text but separate numeric columns in CSV.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich.markup import escape

from feddumap.system import console

Format = Literal["table", "markdown", "csv", "latex", "json"]
Scalar = str | float | None
WIDTH = 120  # of tables where there is no terminal

LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "[": "{[}",  # at the start of a row, [ and * would be arguments of the preceding \\
    "*": "{*}",
}


@dataclass(frozen=True)
class TableCell:
    """A text, and plain values for CSV by the suffix of the column's key (possibly empty)."""

    text: str
    plain: Mapping[str, Scalar] = field(default_factory=dict)
    best: bool = False


@dataclass(frozen=True)
class Column:
    """A title, a key for CSV, and one cell per row."""

    title: str
    key: str
    cells: tuple[TableCell, ...]
    right: bool = True


@dataclass(frozen=True)
class Table:
    """Columns of equal length; the first names the rows."""

    title: str
    columns: tuple[Column, ...]

    def rows(self) -> list[tuple[TableCell, ...]]:
        return list(zip(*(column.cells for column in self.columns), strict=True))


@dataclass(frozen=True)
class Document:
    """Tables, notes, and the data that JSON shows instead of tables."""

    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    data: Any


def text_column(title: str, key: str, texts: Sequence[str]) -> Column:
    """A left-aligned column of texts."""
    return Column(title, key, tuple(TableCell(text, {"": text}) for text in texts), right=False)


def mark_best(
    cells: Sequence[TableCell], scores: Sequence[float | None], lowest: bool = False
) -> tuple[TableCell, ...]:
    """Mark the cells with the highest (or lowest) score, unless all scores are equal.

    >>> [cell.best for cell in mark_best([TableCell("a"), TableCell("b"), TableCell("-")], [1, 2, None])]
    [False, True, False]
    """
    known = {score for score in scores if score is not None}
    if len(known) < 2:
        return tuple(cells)
    top = min(known) if lowest else max(known)
    return tuple(replace(cell, best=score == top) for cell, score in zip(cells, scores, strict=True))


def show(document: Document) -> None:
    """Print tables and notes."""
    _print_tables(document.tables)
    for note in document.notes:
        console.out.print(f"- {note}", markup=False)


def render(document: Document, form: Format) -> str:
    """The document as text in one of the formats. CSV leaves out the notes."""
    return {"table": _text, "markdown": _markdown, "csv": _csv, "latex": _latex, "json": _json}[form](
        document
    )


def _print_tables(tables: Sequence[Table]) -> None:
    for table in tables:
        rows = [
            [f"[bold]{escape(cell.text)}[/bold]" if cell.best else escape(cell.text) for cell in row]
            for row in table.rows()
        ]
        right = [column.title for column in table.columns if column.right]
        titles = [column.title for column in table.columns]
        console.table(escape(table.title), titles, rows, right=right, width=WIDTH)


def _text(document: Document) -> str:
    with redirect_stdout(io.StringIO()) as text:
        _print_tables(document.tables)
    return text.getvalue() + "".join(f"- {note}\n" for note in document.notes)


def _markdown(document: Document) -> str:
    parts = []
    for table in document.tables:
        lines = [[_for_markdown(column.title) for column in table.columns]]
        lines.append(["---:" if column.right else "---" for column in table.columns])
        lines += [[_for_markdown(cell.text, cell.best) for cell in row] for row in table.rows()]
        parts.append(f"**{_for_markdown(table.title)}**\n")
        parts.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    if document.notes:
        parts.append("".join(f"- {_for_markdown(note)}\n" for note in document.notes))
    return "\n".join(parts)


def _for_markdown(text: str, best: bool = False) -> str:
    escaped = re.sub(r"([\\`*|<])", r"\\\1", _one_line(text))
    return f"**{escaped}**" if best else escaped


def plain_rows(document: Document) -> list[dict[str, Scalar]]:
    """The plain values of all tables, one row per name in the first columns."""
    rows: dict[str, dict[str, Scalar]] = {}
    for table in document.tables:
        first = table.columns[0]
        for column in table.columns:
            for name, cell in zip(first.cells, column.cells, strict=True):
                plain = {f"{column.key}_{key}" if key else column.key: cell.plain[key] for key in cell.plain}
                rows.setdefault(name.text, {}).update(plain)
    return list(rows.values())


def _csv(document: Document) -> str:
    rows = plain_rows(document)
    # in the order of the columns: a row may lack some
    header = dict.fromkeys(
        f"{column.key}_{key}" if key else column.key
        for table in document.tables
        for column in table.columns
        for cell in column.cells
        for key in cell.plain
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _latex(document: Document) -> str:
    r"""A booktabs tabular for each table; titles and notes are comments. Needs \usepackage{booktabs}."""
    parts = []
    for table in document.tables:
        columns = "".join("r" if column.right else "l" for column in table.columns)
        lines = [" & ".join(_for_latex(cell.text, cell.best) for cell in row) for row in table.rows()]
        head = " & ".join(_for_latex(column.title) for column in table.columns)
        parts.append(
            f"% {_one_line(table.title)}\n\\begin{{tabular}}{{{columns}}}\n"
            f"\\toprule\n{head} \\\\\n\\midrule\n"
            + "".join(f"{line} \\\\\n" for line in lines)
            + "\\bottomrule\n\\end{tabular}\n"
        )
    if document.notes:
        parts.append("".join(f"% {_one_line(note)}\n" for note in document.notes))
    return "\n".join(parts)


def _for_latex(text: str, best: bool = False) -> str:
    minus = re.sub(r"(?<!\w)-(?=\d)", "−", _one_line(text))
    escaped = "".join(LATEX.get(character, character) for character in minus)
    return f"\\textbf{{{escaped}}}" if best else escaped


def _json(document: Document) -> str:
    return json.dumps(document.data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())
