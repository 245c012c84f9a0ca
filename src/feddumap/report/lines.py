"""The lines of the figures: columns of numbers for every seed of a series, their mean and range, and a style.

The page and the static figures are drawn from the same lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from feddumap.report.series import RecordedRun, Series
from feddumap.runs.summary import evaluated, smooth

MAX_POINTS = 1000  # per line
INK = "ink"  # the colour of text, which depends on the theme

# the colour-blind safe palette of Okabe and Ito, without yellow, which is faint on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross", "star")

Values = list[float | None]
Columns = dict[str, Values]


@dataclass(frozen=True)
class Style:
    """The style of a series in every figure: 7 colours by 5 dashes, and a separate cycle of markers."""

    colour: str
    dash: str
    marker: str


@dataclass(frozen=True)
class SeedColumns:
    """One seed's columns."""

    seed: int
    finished: bool
    columns: Columns


@dataclass(frozen=True)
class SeedTable:
    """A series' columns per seed, and their mean and range over `members` seeds: the finished ones, or all if
    none is finished, for the rounds that they have in common.

    With a single member, the mean is its columns and the range is empty.
    """

    seeds: tuple[SeedColumns, ...]
    members: int
    mean: Columns
    low: Columns
    high: Columns


@dataclass(frozen=True)
class Line:
    """One series: `accuracy` over the evaluated rounds, `rounds` over all rounds."""

    label: str
    style: Style
    accuracy: SeedTable
    rounds: SeedTable


def lines(series: Sequence[Series]) -> list[Line]:
    """The lines of the series, in order."""
    return [
        Line(
            each.label,
            style(place),
            _table(each, [_accuracy(run) for run in each.runs]),
            _table(each, [_rounds(run) for run in each.runs]),
        )
        for place, each in enumerate(series)
    ]


def style(place: int) -> Style:
    """The style of the series with an index.

    >>> style(0), style(7).dash, len({style(i) for i in range(35)})
    (Style(colour='#0072B2', dash='solid', marker='circle'), 'dash', 35)
    """
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    return Style(COLOURS[place % len(COLOURS)], dash, MARKERS[place % len(MARKERS)])


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced indices from 0 to count - 1, including both.

    >>> evenly_spaced(3, 5), evenly_spaced(101, 5)
    ([0, 1, 2], [0, 25, 50, 75, 100])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _accuracy(run: RecordedRun) -> dict[int, dict[str, float | None]]:
    """A row for each evaluated round, keyed by the number of rounds finished then."""
    points = evaluated(run.records)
    smoothed = smooth([point["accuracy"] for point in points])
    carried = dict(
        zip((record["round"] for record in run.records), _cumulative_bytes(run.records), strict=True)
    )
    return {
        point["round"] + 1: {
            "time": point["clock"],
            "bytes": carried[point["round"]],
            "raw": point["accuracy"],
            "smooth": float(value),
            **_by_device(point),
        }
        for point, value in zip(points, smoothed, strict=True)
    }


def _by_device(point: Mapping[str, Any]) -> dict[str, float | None]:
    """Of the devices with test data of their own, if there are any."""
    found = point.get("device_accuracy") or {}
    return {"device_mean": found.get("mean"), "device_worst": found.get("worst_tenth")}


def _rounds(run: RecordedRun) -> dict[int, dict[str, float | None]]:
    """A row for each round: costs, model size and metrics of the server step."""
    first: dict[str, Any] = {"clock": 0.0, "wall": 0.0}
    return {
        record["round"] + 1: {
            "seconds": record["clock"] - before["clock"],
            "wall": record["wall"] - before["wall"],
            "down": record["bytes_down"],
            "up": record["bytes_up"],
            "parameters": record["parameters"],
            "macs": record["macs"],
            "alpha": record.get("alpha"),
            "tau_eff": record.get("tau_eff"),
        }
        for before, record in pairwise([first, *run.records])
    }


def _cumulative_bytes(records: Sequence[dict[str, Any]]) -> Iterator[int]:
    total = 0
    for record in records:
        total += record["bytes_down"] + record["bytes_up"]
        yield total


def _table(series: Series, runs: Sequence[dict[int, dict[str, float | None]]]) -> SeedTable:
    pairs = list(zip(series.runs, runs, strict=True))
    seeds = tuple(SeedColumns(run.seed, run.finished, _columns(rows)) for run, rows in pairs)
    members = [rows for run, rows in pairs if run.finished] or list(runs)
    if len(members) == 1:
        return SeedTable(seeds, 1, _columns(members[0]), {}, {})
    merged: list[dict[int, dict[str, float | None]]] = [{}, {}, {}]
    for number in sorted(set.intersection(*(set(rows) for rows in members))):
        for bound, row in zip(merged, _mean_and_range([rows[number] for rows in members]), strict=True):
            bound[number] = row
    return SeedTable(seeds, len(members), *map(_columns, merged))


def _mean_and_range(rows: Sequence[dict[str, float | None]]) -> Iterator[dict[str, float | None]]:
    """Mean, minimum and maximum of each column; None where any row has none."""
    known = {key: [value for row in rows if (value := row[key]) is not None] for key in rows[0]}
    whole = {key: values if len(values) == len(rows) else [] for key, values in known.items()}
    yield {key: sum(values) / len(values) if values else None for key, values in whole.items()}
    yield {key: min(values, default=None) for key, values in whole.items()}
    yield {key: max(values, default=None) for key, values in whole.items()}


def _columns(rows: dict[int, dict[str, float | None]]) -> Columns:
    """Rows as columns, thinned to `MAX_POINTS`."""
    numbers = sorted(rows)
    kept = [numbers[place] for place in evenly_spaced(len(numbers), MAX_POINTS)]
    columns: Columns = {"round": [float(number) for number in kept]}
    for name in rows[kept[0]] if kept else ():
        columns[name] = [rows[number][name] for number in kept]
    return columns
