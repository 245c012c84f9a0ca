"""Who held which labels: the label mix of a run's devices and of its server, from its split and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from feddumap.config import Config
from feddumap.data import dataset
from feddumap.data.label_mix import divergence, mix
from feddumap.data.partition import Split
from feddumap.data.sources import catalog
from feddumap.errors import FeddumapError
from feddumap.report.lines import evenly_spaced
from feddumap.report.series import RecordedRun

SHOWN = 100  # devices

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LabelMixes:
    """The label mixes of some devices of one split: a row a device, a column a class.

    Degrees are Jensen-Shannon divergences in bits from the mix of all devices.
    """

    title: str
    classes: tuple[str, ...]
    devices: tuple[int, ...]  # those shown
    total: int  # devices in all
    shares: Floats
    degrees: Floats
    mean_degree: float  # of all devices
    server: Floats | None
    server_degree: float | None
    seeds: tuple[int, ...]  # the first is shown


@dataclass(frozen=True)
class MissingLabelMixes:
    """A split whose label mix cannot be shown, and why."""

    title: str
    reason: str


def label_mixes(runs: Sequence[RecordedRun]) -> list[LabelMixes | MissingLabelMixes]:
    """The mix of each way of splitting among the runs, of the lowest seed that was split so."""
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
        parts.append(f"{data.shards_per_device} shards a device")
    if data.size_spread:
        parts.append(f"sizes spread by {data.size_spread:g}")
    parts.append(f"server p = {data.server_fraction:g}")
    if data.server_classes:
        parts.append(f"{data.server_classes} server classes")
    return ", ".join(parts)


def _mix(title: str, run: RecordedRun, seeds: tuple[int, ...]) -> LabelMixes:
    name = run.config.data.name
    folder = catalog.cache_folder(name)
    if not folder.exists():
        raise FeddumapError(
            f"the data set {name} is not in the cache {folder}: run `feddumap data get {name}` and make the "
            "report again"
        )
    data = dataset.read(folder, verify=False)
    labels, classes = np.asarray(data.train_labels), len(data.classes)
    split = _read_split(run.path, len(labels))
    counts = split.counts(labels, classes)
    everyone = counts.sum(axis=0)
    degrees = divergence(counts, everyone)
    kept = evenly_spaced(split.devices, SHOWN)
    server = np.bincount(labels[split.server], minlength=classes) if len(split.server) else None
    return LabelMixes(
        title=title,
        classes=data.classes,
        devices=tuple(kept),
        total=split.devices,
        shares=mix(counts[kept]),
        degrees=degrees[kept],
        mean_degree=float(degrees.mean()),
        server=None if server is None else mix(server),
        server_degree=None if server is None else float(divergence(server, everyone)),
        seeds=seeds,
    )


def _read_split(path: Path, images: int) -> Split:
    """A run's split, read without its lock: it is written once, before the first round."""
    file = path / "split.safetensors"
    try:
        return Split.from_arrays(load_file(file), images)
    except (OSError, SafetensorError) as error:
        raise FeddumapError(
            f"cannot read {file} ({error}): it says who held what, and cannot be shown without"
        ) from None
