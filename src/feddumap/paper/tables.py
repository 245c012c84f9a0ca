"""An item's results as tables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from feddumap.paper.item import Item
from feddumap.paper.labels import SYMBOLS, keys, largest_in, place, sentence
from feddumap.paper.results import Finding, PaperRow, Results
from feddumap.report.statistics import Spread, TimeToTarget
from feddumap.report.tables import Column, Document, Table, TableCell, text_column

NONE = TableCell("")


def document(found: Results, changed: Sequence[str], grouped: bool) -> Document:
    """Tables of the rows, one per model if `grouped`, and of the claims; the notes begin with the keys
    `changed` on the command line."""
    groups: dict[str, list[PaperRow]] = {}
    for row in found.rows:
        groups.setdefault(_group(row) if grouped else "", []).append(row)
    tables = [_table(found.item, title, rows) for title, rows in groups.items()]
    if found.findings:
        tables.append(_findings(found))
    return Document(tuple(tables), tuple(_notes(found, changed)), as_json(found, changed))


def _notes(found: Results, changed: Sequence[str]) -> list[str]:
    notes = [f"Set for these runs: {', '.join(changed)}."] if changed else []
    if found.absent:
        notes.append(f"{found.absent} rows of the paper are left out: --set excludes their runs.")
    notes += [f"Without a counterpart: {text}" for text in found.item.no_counterpart]
    return [*notes, *found.item.notes]


def _group(row: PaperRow) -> str:
    return place(row.ours) + (f", time in seconds to {row.target:g}" if row.target is not None else "")


def _table(item: Item, title: str, rows: Sequence[PaperRow]) -> Table:
    full = [", ".join(filter(None, (row.name, place(row.ours), keys(row.ours)))) for row in rows]
    texts = [row.name for row in rows] if title else full
    shown = [key for key in SYMBOLS if any(key in row.ours.swept for row in rows)]
    told = [_key_column(key, rows) for key in shown]
    made = [
        _paper("accuracy", rows, "{:.3f}"),
        _ours("accuracy", [_cell(row.ours.accuracy("best_smoothed"), "{:.3f}") for row in rows]),
        Column("last\n10", "mean10", tuple(_last(row) for row in rows)),
        _paper("time", rows, "{:,.0f}"),
        _ours("time", [_time(row) for row in rows]),
        _paper("MFLOPs", rows, "{:.1f}"),
        _ours("MFLOPs", [_mflops(row) for row in rows]),
    ]
    kept = [column for column in made if any(cell.text for cell in column.cells)]
    return Table(title or item.number, (text_column("method", "row", texts), *told, *kept))


def _key_column(key: str, rows: Sequence[PaperRow]) -> Column:
    values = [row.ours.swept.get(key) for row in rows]
    cells = [NONE if value is None else TableCell(str(value), {"": value}) for value in values]
    return Column(SYMBOLS[key], key, tuple(cells))


def _paper(title: str, rows: Sequence[PaperRow], form: str) -> Column:
    values = [row.paper.get(title.lower()) for row in rows]
    cells = [
        NONE
        if value is None
        else TableCell("never", {"": "never"})
        if math.isnan(value)
        else TableCell(form.format(value), {"": value})
        for value in values
    ]
    return Column(f"paper\n{title}", f"paper_{title.lower()}", tuple(cells))


def _ours(title: str, cells: Sequence[TableCell]) -> Column:
    return Column(f"our\n{title}", title.lower(), tuple(cells))


def _last(row: PaperRow) -> TableCell:
    """Without the deviation in the text, to save width; CSV has it."""
    found = row.ours.accuracy("mean10")
    whole = _cell(found, "{:.3f}")
    return whole if found is None else TableCell(f"{found.mean:.3f}", whole.plain)


def _mflops(row: PaperRow) -> TableCell:
    found = row.ours.cost("macs")
    scaled = found and Spread(found.mean / 1e6, found.std and found.std / 1e6, found.n)
    return _cell(scaled, "{:.1f}")


def _time(row: PaperRow) -> TableCell:
    found = row.ours.time(row.target)
    if found is None:
        return NONE if row.target is None else TableCell("-", {})
    if found.clock is None:
        text = f"{found.reached} of {found.seeds} seeds" if found.reached else "never"
        return TableCell(text, {"mean": text})
    return _cell(found.clock, "{:,.0f}")


def _cell(found: Spread | None, form: str) -> TableCell:
    """Mean ± standard deviation, which is left out if it rounds to 0."""
    if found is None:
        return TableCell("-", {})
    shown = form.format(found.mean)
    if found.std is not None and float(form.format(found.std).replace(",", "")):
        shown += f" ± {form.format(found.std)}"
    return TableCell(shown, {"mean": found.mean, "std": found.std})


def _findings(found: Results) -> Table:
    each = found.findings
    return Table(
        "Claims of the text",
        (
            text_column("comparison", "row", [sentence(found.item, one) for one in each]),
            Column(
                "paper",
                "paper_claim",
                tuple(TableCell(one.reference.says, {"": one.reference.value}) for one in each),
            ),
            Column("ours", "claim", tuple(_claimed(one) for one in each)),
            text_column("largest in", "claim_largest_in", [largest_in(one) for one in each]),
        ),
    )


def _claimed(one: Finding) -> TableCell:
    if one.ours is None:
        return TableCell("-", {})
    if one.claim.measure == "accuracy":
        text = f"{100 * one.ours:.1f} points"
    elif one.reference.says.rstrip("s").endswith("time"):
        text = f"{one.ours:.1f} times"
    else:
        text = f"{100 * one.ours:.1f}%"
    return TableCell(text, {"": one.ours})


def about(item: Item) -> dict[str, Any]:
    """The description of an item."""
    return {
        key: getattr(item, key)
        for key in ("name", "number", "label", "caption", "shows", "notes", "no_counterpart", "targets")
    }


def as_json(found: Results, changed: Sequence[str]) -> dict[str, Any]:
    """The results as JSON data, with the run directories."""
    return {
        **about(found.item),
        "changed": list(changed),
        "rows": [
            {
                "name": row.name,
                "keys": {
                    **{key: row.ours.values[key] for key in ("data.name", "model.name")},
                    **row.ours.swept,
                },
                "paper": {key: None if math.isnan(value) else value for key, value in row.paper.items()},
                "ours": {
                    "accuracy": _plain(row.ours.accuracy("best_smoothed")),
                    "mean10": _plain(row.ours.accuracy("mean10")),
                    "final": _plain(row.ours.accuracy("final")),
                    "target": row.target,
                    "time": _plain(row.ours.time(row.target)),
                    "macs": _plain(row.ours.cost("macs")),
                    "parameters": _plain(row.ours.cost("parameters")),
                },
                "directories": [str(cell.path) for cell in row.ours.cells],
            }
            for row in found.rows
        ],
        "absent_rows": found.absent,
        "claims": [
            {
                "quote": one.claim.quote,
                "comparison": sentence(found.item, one),
                "paper": one.reference.value,
                "ours": one.ours,
                "pairs": one.pairs,
                "largest_in": largest_in(one) or None,
            }
            for one in found.findings
        ],
    }


def _plain(found: Spread | TimeToTarget | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)
