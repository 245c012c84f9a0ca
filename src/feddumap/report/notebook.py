"""What a notebook shows: runs and tables as HTML without scripts, and pandas tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

from feddumap.errors import FeddumapError
from feddumap.report.tables import Document
from feddumap.runs.summary import evaluated
from feddumap.system.console import byte_size, duration, percent

if TYPE_CHECKING:
    from pandas import DataFrame

WIDTH, HEIGHT, MARGIN = 360, 120, 34


def frame(rows: Sequence[Mapping[str, Any]], index: str | None = None) -> DataFrame:
    """A pandas table of these rows; an error if pandas is not installed."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise FeddumapError(
            "frame() needs the package pandas, which is not installed: pip install pandas"
        ) from None
    made: DataFrame = pandas.DataFrame([dict(row) for row in rows])
    return made.set_index(index) if index is not None and index in made else made


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the fields of mappings in it as columns of their own.

    >>> flat({"round": 0, "validation": {"accuracy": 0.5}})
    {'round': 0, 'validation.accuracy': 0.5}
    """
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": each for inner, each in flat(value).items()}
        else:
            found[name] = value
    return found


def run_html(summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """The summary of a run and its accuracy by round."""
    accuracy = summary["accuracy"]
    rows = [
        ("rounds", f"{summary['rounds']:,} of {rounds:,}"),
        ("accuracy", percent(accuracy["final"])),
        ("mean of the last 10", percent(accuracy["mean10"])),
        ("parameters", f"{summary['parameters']:,}"),
        ("sent down, up", f"{byte_size(summary['bytes_down'])}, {byte_size(summary['bytes_up'])}"),
        ("virtual clock", duration(summary["clock"])),
        ("wall time", duration(summary["wall"])),
    ]
    title = f"{summary['method']} · {summary['model']} · {summary['dataset']}"
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return (
        '<div style="display:flex;gap:2em;flex-wrap:wrap">'
        f"<table><caption>{escape(title)}</caption>{cells}</table>{_curve(records)}</div>"
    )


def _curve(records: Sequence[Mapping[str, Any]]) -> str:
    """The accuracy by round as an SVG drawing; empty before the second evaluation."""
    points = [(record["round"], record["accuracy"]) for record in evaluated(records)]
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(value for _, value in points), max(value for _, value in points)
    height = (high - low) or 1.0
    drawn = " ".join(
        f"{MARGIN + (WIDTH - MARGIN) * (number - first) / (last - first):.1f},"
        f"{4 + (HEIGHT - 24) * (high - value) / height:.1f}"
        for number, value in points
    )
    label = 'font-size="10" fill="currentColor"'
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="accuracy by round">'
        f'<polyline points="{drawn}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
        f'<text x="0" y="12" {label}>{percent(high)}</text>'
        f'<text x="0" y="{HEIGHT - 18}" {label}>{percent(low)}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 3}" {label}>round {first}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 3}" text-anchor="end" {label}>{last}</text></svg>'
    )


def tables_html(document: Document) -> str:
    """Tables and notes."""
    parts = []
    for table in document.tables:
        head = "".join(f"<th>{escape(column.title)}</th>" for column in table.columns)
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td>{'<b>' if cell.best else ''}{escape(cell.text)}{'</b>' if cell.best else ''}</td>"
                for cell in row
            )
            + "</tr>"
            for row in table.rows()
        )
        caption = f"<caption>{escape(table.title)}</caption>"
        parts.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")
    if document.notes:
        parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in document.notes) + "</ul>")
    return "".join(parts)
