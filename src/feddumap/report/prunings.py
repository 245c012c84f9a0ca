"""Prunings of a series' networks, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from feddumap.report.series import Series


@dataclass(frozen=True)
class SeriesPruning:
    """The last pruning of each seed of a series: `records` are the `pruning` entries, with their round.

    `what` is "filters" or "weights"; `times` is the largest number of prunings of a seed.
    """

    place: int  # index of the series
    label: str
    model: str
    what: str
    times: int
    seeds: tuple[int, ...]
    records: tuple[dict[str, Any], ...]

    @property
    def removed(self) -> dict[str, float]:
        """The share removed from each layer, averaged over seeds."""
        return {
            name: fmean(
                1 - each["layers"][name]["kept"] / each["layers"][name][self.what] for each in self.records
            )
            for name in self.records[0]["layers"]
        }


def prunings(series: Sequence[Series]) -> list[SeriesPruning]:
    """The prunings of the series that were pruned."""
    found = []
    for place, each in enumerate(series):
        pruned = {run.seed: [record for record in run.records if "pruning" in record] for run in each.runs}
        last = {seed: records[-1] for seed, records in pruned.items() if records}
        if not last:
            continue
        layers = next(iter(last.values()))["pruning"]["layers"]
        found.append(
            SeriesPruning(
                place=place,
                label=each.label,
                model=each.config.model.name,
                what="weights" if any("weights" in layer for layer in layers.values()) else "filters",
                times=max(map(len, pruned.values())),
                seeds=tuple(last),
                records=tuple({**record["pruning"], "round": record["round"]} for record in last.values()),
            )
        )
    return found


def groups(found: Sequence[SeriesPruning]) -> list[list[SeriesPruning]]:
    """Prunings grouped by model and kind; one figure shows a group."""
    grouped: dict[tuple[str, str], list[SeriesPruning]] = {}
    for pruned in found:
        grouped.setdefault((pruned.model, pruned.what), []).append(pruned)
    return list(grouped.values())


def layers(group: Sequence[SeriesPruning]) -> list[str]:
    """The pruned layers of a group, in the order of the network."""
    longest = max((pruned.removed for pruned in group), key=len)
    return list(dict.fromkeys([*longest, *(name for pruned in group for name in pruned.removed)]))
