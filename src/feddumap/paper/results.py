"""Measured results next to the paper's: the rows of its tables, and the claims of its text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from feddumap.paper.item import METRICS, Claim, ClaimMeasure, Item, Reference, Selector
from feddumap.paper.run_names import flat
from feddumap.report.series import RecordedRun
from feddumap.report.statistics import (
    RunStatistics,
    Spread,
    TimeToTarget,
    run_statistics,
    spread,
    time_to_target,
)
from feddumap.runs.reader import read_records
from feddumap.sweep.grid import Cell
from feddumap.sweep.status import summary_of

PAIRING_KEYS = ("data.name", "model.name")


@dataclass(frozen=True)
class Measured:
    """Cells that differ only in their seeds: swept keys, full configuration, and statistics of the finished
    runs."""

    swept: Mapping[str, Any]
    values: Mapping[str, Any]
    cells: tuple[Cell, ...]
    runs: tuple[RunStatistics, ...]

    @property
    def model(self) -> str:
        return str(self.values["model.name"])

    def accuracy(self, kind: str) -> Spread | None:
        return spread([run.accuracy[kind] for run in self.runs])

    def cost(self, kind: str) -> Spread | None:
        return spread([run.cost[kind] for run in self.runs])

    def time(self, target: float | None) -> TimeToTarget | None:
        return time_to_target(self.runs, target) if target is not None and self.runs else None


@dataclass(frozen=True)
class PaperRow:
    """Runs under their name in the paper, with the paper's numbers (accuracy, time, mflops) if any."""

    name: str
    paper: Mapping[str, float]
    ours: Measured
    target: float | None


@dataclass(frozen=True)
class Finding:
    """A claim and the measured difference (None if unknown), the number of compared pairs of runs, and the
    runs with the largest difference."""

    claim: Claim
    reference: Reference
    ours: float | None
    pairs: int
    largest: Measured | None


@dataclass(frozen=True)
class Results:
    """The results of an item. `absent` is the number of the paper's rows whose runs --set excludes."""

    item: Item
    rows: tuple[PaperRow, ...]
    absent: int
    findings: tuple[Finding, ...]


def results(item: Item, cells: Sequence[Cell]) -> Results:
    """The results of an item's cells, finished or not, with the paper's numbers."""
    found = group_cells(item, cells)
    rows: list[PaperRow] = []
    absent = 0
    for line in (line for numbers in item.numbers for line in numbers.dicts()):
        matching = select(found, {key: value for key, value in line.items() if "." in key})
        assert len(matching) <= 1, f"{item.name}: {line} fits several of its cells"
        absent += not matching
        paper = {metric: float(line[metric]) for metric in METRICS if metric in line}
        rows += [PaperRow(str(line["name"]), paper, each, item.targets.get(each.model)) for each in matching]
    named = [id(row.ours) for row in rows]
    rows += [
        PaperRow(each.values["method.name"], {}, each, item.targets.get(each.model))
        for each in found
        if id(each) not in named
    ]
    findings = [
        evaluate_claim(item, claim, reference, found) for claim in item.claims for reference in claim.over
    ]
    return Results(item, tuple(rows), absent, tuple(findings))


def group_cells(item: Item, cells: Iterable[Cell]) -> list[Measured]:
    """The cells grouped over seeds."""
    claimed = (claim.target for claim in item.claims if claim.target is not None)
    targets = sorted({*item.targets.values(), *claimed})
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.config.model_dump_json(exclude={"run": {"seed"}}), []).append(cell)
    return [
        Measured(
            {key: value for key, value in group[0].swept.items() if key != "run.seed"},
            flat(group[0].config),
            tuple(group),
            tuple(cell_statistics(cell, targets) for cell in group if summary_of(cell) is not None),
        )
        for group in groups.values()
    ]


def cell_statistics(cell: Cell, targets: Sequence[float]) -> RunStatistics:
    """The statistics of a finished cell."""
    return run_statistics(
        RecordedRun(cell.path, cell.config, read_records(cell.path), finished=True), targets
    )


def select(found: Iterable[Measured], where: Selector) -> list[Measured]:
    """Those whose configuration has all of these values, or one of a list of values."""
    return [
        each
        for each in found
        if all(
            key in each.values and each.values[key] in (value if isinstance(value, list) else [value])
            for key, value in where.items()
        )
    ]


def evaluate_claim(item: Item, claim: Claim, reference: Reference, found: Sequence[Measured]) -> Finding:
    """Evaluate a claim over all matching pairs."""
    alike = (*PAIRING_KEYS, *claim.alike)
    values = [
        (value, one)
        for one in select(found, claim.of)
        for other in select(found, reference.where)
        if all(one.values.get(key) == other.values.get(key) for key in alike)
        and (value := relative_difference(claim.measure, one, other, target_of(item, claim, one))) is not None
    ]
    if not values:
        return Finding(claim, reference, None, 0, None)
    if claim.take == "mean":
        return Finding(claim, reference, fmean(value for value, _ in values), len(values), None)
    top, one = max(values, key=lambda pair: pair[0])
    return Finding(claim, reference, top, len(values), one)


def target_of(item: Item, claim: Claim, one: Measured) -> float | None:
    """The target accuracy of a claim's times."""
    return claim.target if claim.target is not None else item.targets.get(one.model)


def relative_difference(
    measure: ClaimMeasure, one: Measured, other: Measured, target: float | None
) -> float | None:
    """Compare means over seeds as the paper does; None if either is missing.

    accuracy: the difference; faster, longer, more compute: the ratio minus 1; slower: the ratio;
    less compute, smaller: the relative reduction.
    """
    a, b = quantity(measure, one, target), quantity(measure, other, target)
    if a is None or b is None:
        return None
    match measure:
        case "accuracy":
            return a - b
        case "slower":
            return a / b
        case "faster":
            return b / a - 1
        case "longer" | "more compute":
            return a / b - 1
        case "less compute" | "smaller":
            return 1 - a / b


def quantity(measure: ClaimMeasure, one: Measured, target: float | None) -> float | None:
    """The quantity that a measure compares; a time is None unless all seeds reached the target."""
    if measure in ("faster", "slower"):
        reached = one.time(target)
        found = reached.clock if reached is not None else None
    elif measure == "accuracy":
        found = one.accuracy("best_smoothed")
    else:
        kind = {"longer": "clock", "smaller": "parameters"}.get(measure, "macs")
        found = one.cost(kind)
    return found.mean if found is not None else None
