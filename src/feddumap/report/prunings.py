"""What was removed from a series' networks, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from feddumap.report.series import Series


@dataclass(frozen=True)
class SeriesPruning:
    """The last pruning of each seed of a series: `records` are the `pruning` entries, with their round.

    `what` was removed is filters or weights, and `times` is how often the series was pruned at most.
    """

    place: int  # of the series
    label: str
    model: str
    what: str
    times: int
    seeds: tuple[int, ...]
    records: tuple[dict[str, Any], ...]

    @property
    def removed(self) -> dict[str, float]:
        """The share removed from each layer, the mean over seeds."""
        return {
            name: fmean(
                1 - each["layers"][name]["kept"] / each["layers"][name][self.what] for each in self.records
            )
            for name in self.records[0]["layers"]
        }


def prunings(series: Sequence[Series]) -> list[SeriesPruning]:
    """The series that were pruned."""
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
    """The prunings of each model and of each kind, which a figure can show together."""
    grouped: dict[tuple[str, str], list[SeriesPruning]] = {}
    for pruned in found:
        grouped.setdefault((pruned.model, pruned.what), []).append(pruned)
    return list(grouped.values())


def layers(group: Sequence[SeriesPruning]) -> list[str]:
    """The layers that any of a group was pruned in: in the order of the network, as far as one names them."""
    longest = max((pruned.removed for pruned in group), key=len)
    return list(dict.fromkeys([*longest, *(name for pruned in group for name in pruned.removed)]))
