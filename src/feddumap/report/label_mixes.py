"""Label mixes of a run's devices and server, from its split and the cached data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from feddumap.config import Config
from feddumap.data import cache
from feddumap.data.label_mix import mix, split_mixes
from feddumap.data.partition import Split
from feddumap.data.sources import catalog, code
from feddumap.errors import FeddumapError
from feddumap.report.lines import evenly_spaced
from feddumap.report.series import RecordedRun
from feddumap.runs import integrity

MAX_DEVICES = 100  # shown in a figure

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LabelMixes:
    """The label mixes of some devices of one split: a row per device, a column per class.

    Degrees are base-2 Jensen-Shannon divergences from the mix of all devices.
    """

    title: str
    classes: tuple[str, ...]
    devices: tuple[int, ...]  # shown
    total: int  # number of devices
    shares: Floats
    degrees: Floats
    mean_degree: float  # over all devices
    server: Floats | None
    server_degree: float | None
    seeds: tuple[int, ...]  # that of the first is shown


@dataclass(frozen=True)
class MissingLabelMixes:
    """A split whose label mixes are unavailable, and why."""

    title: str
    reason: str


def label_mixes(runs: Sequence[RecordedRun]) -> list[LabelMixes | MissingLabelMixes]:
    """The label mixes of each data configuration among the runs, for its lowest seed."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(run.config.data.model_dump_json(exclude={"augment"}), []).append(run)
    several = len(groups) > 1
    found: list[LabelMixes | MissingLabelMixes] = []
    for group in groups.values():
        seeds = tuple(sorted({run.seed for run in group}))
        run = min(group, key=lambda run: run.seed)
        title = _title(run.config, several)
        try:
            found.append(_mix(title, run, seeds))
        except FeddumapError as error:
            found.append(MissingLabelMixes(title, str(error)))
    return found


def _title(config: Config, several: bool) -> str:
    data = config.data
    name = Path(data.name).name
    if not several:
        return name
    parts = [name, f"{data.devices:,} devices", data.partition]
    if data.partition == "dirichlet":
        parts.append(f"alpha {data.alpha:g}")
    if data.partition == "shards" and data.shards_per_device:
        parts.append(f"{data.shards_per_device} shards per device")
    if data.size_spread:
        parts.append(f"size spread {data.size_spread:g}")
    parts.append(f"server p = {data.server_fraction:g}")
    if data.server_classes:
        parts.append(f"{data.server_classes} server classes")
    return ", ".join(parts)


def _mix(title: str, run: RecordedRun, seeds: tuple[int, ...]) -> LabelMixes:
    name = run.config.data.name
    if code.is_code(name) or name in code.names():
        raise FeddumapError(
            f"the data set {name} is made by code, which a report does not run: see `feddumap inspect data`"
        )
    folder = catalog.cache_folder(run.config.data)
    if not folder.exists():
        raise FeddumapError(
            f"the data set {name} is not in the cache {folder}: run `feddumap data get {name}` and rerun the "
            "report"
        )
    data = cache.read(folder, verify=False)
    labels, classes = np.asarray(data.train_labels), len(data.classes)
    split = Split.from_arrays(integrity.read_split(run.path)[0], len(labels))  # written once, before round 0
    found = split_mixes(split, labels, classes)
    kept = evenly_spaced(split.devices, MAX_DEVICES)
    return LabelMixes(
        title=title,
        classes=data.classes,
        devices=tuple(kept),
        total=split.devices,
        shares=mix(found.counts[kept]),
        degrees=found.degrees[kept],
        mean_degree=float(found.degrees.mean()),
        server=None if found.server_degree is None else mix(found.server_counts),
        server_degree=found.server_degree,
        seeds=seeds,
    )
