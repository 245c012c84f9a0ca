"""The tables of a comparison: accuracy, time to targets, cost, and the significance test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from feddumap.report.statistics import (
    LEVEL,
    AccuracyMeasure,
    Comparison,
    Difference,
    SeriesStatistics,
    Spread,
    TimeToTarget,
)
from feddumap.report.tables import Column, Document, Table, TableCell, mark_best, text_column
from feddumap.system.console import metric

TEST = "paired t-test over common seeds (scipy.stats.ttest_rel), two-sided"
ADJUSTED = "Holm, for the number of series tested against the base"
TITLES: dict[AccuracyMeasure, str] = {"final": "final", "mean10": "last 10", "best_smoothed": "best smoothed"}
DESCRIPTIONS: dict[AccuracyMeasure, str] = {
    "final": "final accuracy",
    "mean10": "mean accuracy of the last 10",
    "best_smoothed": "best smoothed accuracy",
}
SIGNIFICANCE = 0.05  # p values below are called significant


def document(value: Comparison, notes: Sequence[str]) -> Document:
    """The tables and notes of a comparison; the JSON data includes every run."""
    tables = [_accuracy(value), _times(value), _cost(value)]
    if any(row.difference and row.difference.p is not None for row in value.rows):
        tables.append(_test(value))
    return Document(tuple(tables), tuple(notes), data(value, notes))


def data(value: Comparison, notes: Sequence[str]) -> dict[str, Any]:
    """The comparison as JSON data."""
    return {
        "base": value.base,
        "measure": value.measure,
        "test": TEST,
        "adjusted": ADJUSTED,
        "confidence": LEVEL,
        "targets": list(value.targets),
        "series": [asdict(row) for row in value.rows],
        "notes": list(notes),
    }


def _accuracy(value: Comparison) -> Table:
    def rounds(row: SeriesStatistics) -> TableCell:
        low, high = min(run.rounds for run in row.runs), max(run.rounds for run in row.runs)
        return TableCell(str(low) if low == high else f"{low} to {high}", {"min": low, "max": high})

    seeds = tuple(TableCell(str(len(row.runs)), {"": len(row.runs)}) for row in value.rows)
    columns = [
        _series(value),
        Column("seeds", "seeds", seeds),
        Column("rounds", "rounds", tuple(map(rounds, value.rows))),
    ]
    for measure, title in TITLES.items():
        spreads = [row.accuracy[measure] for row in value.rows]
        columns.append(_spreads(f"{title} (%)", measure, spreads, in_percent))
    return Table("Accuracy", tuple(columns))


def _times(value: Comparison) -> Table:
    columns = [_series(value)]
    for index, target in enumerate(value.targets):
        times = [row.times[index] for row in value.rows]
        means = [time.clock.mean if time.clock else None for time in times]
        key = f"time_to_{target}"
        cells = mark_best([_reach(time) for time in times], means, lowest=True)
        columns.append(Column(f"to {100 * target:g} % (s)", key, cells))
        ratios = tuple(
            TableCell("-" if time.ratio is None else f"{time.ratio:.2f}", {"": time.ratio}) for time in times
        )
        columns.append(Column("ratio", f"{key}_ratio", ratios))
    columns.append(_costs("total (s)", "clock", value, in_seconds))
    targets = f" to target accuracies, relative to {value.base}, and" if value.targets else ""
    return Table(f"Virtual time{targets} in total", tuple(columns))


def _reach(time: TimeToTarget) -> TableCell:
    if time.clock is not None:
        text = in_seconds(time.clock)
    elif time.reached:
        text = f"{time.reached} of {time.seeds} seeds"
    else:
        text = "not reached"
    return TableCell(text, {**_plain(time.clock), "reached": time.reached, "n": time.seeds})


def _cost(value: Comparison) -> Table:
    columns = (
        _series(value),
        _costs("parameters", "parameters", value, in_units),
        _costs("MACs", "macs", value, in_units),
        _costs("sent down", "bytes_down", value, in_bytes),
        _costs("sent up", "bytes_up", value, in_bytes),
    )
    return Table("Final model, and total bytes", columns)


def _costs(title: str, key: str, value: Comparison, show: Callable[[Spread], str]) -> Column:
    """A column of costs; sums over rounds are ranked only if all runs have equally many rounds."""
    alike = len({run.rounds for row in value.rows for run in row.runs}) == 1
    column = _spreads(title, key, [row.cost[key] for row in value.rows], show, lowest=True)
    if alike or key in ("parameters", "macs"):
        return column
    return replace(column, cells=tuple(replace(cell, best=False) for cell in column.cells))


def _test(value: Comparison) -> Table:
    several = sum(bool(row.difference and row.difference.p is not None) for row in value.rows) > 1

    def column(title: str, key: str, cell: Callable[[Difference], TableCell]) -> Column:
        cells = [cell(row.difference) if row.difference else TableCell("") for row in value.rows]
        return Column(title, key, tuple(cells))

    def verdict(row: SeriesStatistics) -> str:
        if row.difference is None:
            return "base"
        p = row.difference.holm
        if p is None:
            return "needs at least two common seeds"
        return "yes" if p < SIGNIFICANCE else "not shown"

    columns = [
        _series(value),
        column("pairs", "pairs", lambda each: TableCell(str(len(each.seeds)), {"": len(each.seeds)})),
        column("points", "difference", lambda each: TableCell(_points(each.mean), {"": each.mean})),
        column(f"{100 * LEVEL:g} % interval", "difference", _interval),
        column("p", "p", lambda each: TableCell(p_value(each.p), {"": each.p})),
    ]
    if several:
        columns.append(
            column("p (Holm)", "p_holm", lambda each: TableCell(p_value(each.holm), {"": each.holm}))
        )
    verdicts = tuple(TableCell(verdict(row)) for row in value.rows)
    columns.append(Column("significant", "verdict", verdicts, right=False))
    title = f"Difference to {value.base} in {DESCRIPTIONS[value.measure]}: paired t-test over seeds"
    return Table(title, tuple(columns))


def _interval(each: Difference) -> TableCell:
    text = "-" if each.low is None else f"[{_points(each.low)}, {_points(each.high)}]"
    return TableCell(text, {"low": each.low, "high": each.high})


def _series(value: Comparison) -> Column:
    return text_column("series", "series", [row.label for row in value.rows])


def _spreads(
    title: str,
    key: str,
    spreads: Sequence[Spread | None],
    show: Callable[[Spread], str],
    lowest: bool = False,
) -> Column:
    cells = [
        TableCell("-" if each is None else show(each), {**_plain(each), "n": each.n if each else 0})
        for each in spreads
    ]
    return Column(title, key, mark_best(cells, [each.mean if each else None for each in spreads], lowest))


def _plain(spread: Spread | None) -> dict[str, float | None]:
    return {"mean": spread.mean if spread else None, "std": spread.std if spread else None}


def in_percent(spread: Spread) -> str:
    """
    >>> in_percent(Spread(0.91234, 0.0042, 3)), in_percent(Spread(0.5, None, 1))
    ('91.23 ± 0.42', '50.00')
    """
    return f"{100 * spread.mean:.2f}" + ("" if spread.std is None else f" ± {100 * spread.std:.2f}")


def in_seconds(spread: Spread) -> str:
    """The deviation is left out where all seeds agree.

    >>> in_seconds(Spread(15953.2, 120.4, 3)), in_seconds(Spread(48.23, None, 1))
    ('15,953 ± 120', '48.2')
    """
    digits = 1 if spread.mean < 100 else 0
    return f"{spread.mean:,.{digits}f}" + (f" ± {spread.std:,.{digits}f}" if spread.std else "")


def in_units(spread: Spread) -> str:
    """
    >>> in_units(Spread(61706, 0.0, 3)), in_units(Spread(9_750_922.5, 12_000.0, 2))
    ('61.7 k', '9.75 ± 0.01 M')
    """
    return metric(spread.mean, deviation=spread.std)


def in_bytes(spread: Spread) -> str:
    """
    >>> in_bytes(Spread(37_200_000, 0.0, 2)), in_bytes(Spread(950, None, 1))
    ('37.2 MB', '950 B')
    """
    return metric(spread.mean, "B", spread.std)


def p_value(p: float | None) -> str:
    """
    >>> p_value(0.0421), p_value(0.00002), p_value(0.0), p_value(None)
    ('0.042', '<0.001', '0', '-')
    """
    if p is None:
        return "-"
    return "<0.001" if 0 < p < 0.001 else f"{p:.3f}" if p else "0"


def _points(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.2f}"
