"""Run directories, finished or in training, grouped into series over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from feddumap.config import Config
from feddumap.errors import FeddumapError
from feddumap.methods.registry import with_defaults
from feddumap.runs.reader import read_config, read_records
from feddumap.runs.summary import accuracies, finished

NAMES = ("method.name", "model.name", "data.name")


@dataclass(frozen=True)
class RecordedRun:
    """One run: directory, resolved configuration and records so far."""

    path: Path
    config: Config
    records: Sequence[dict[str, Any]]
    finished: bool

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @cached_property
    def accuracy(self) -> dict[str, float | None]:
        """final, mean10, best and best_smoothed."""
        return accuracies(self.records)


@dataclass(frozen=True)
class Series:
    """Runs that differ only in their seeds, in the order of the seeds, with a distinct label."""

    label: str
    runs: tuple[RecordedRun, ...]

    @property
    def config(self) -> Config:
        return self.runs[0].config


def find_runs(paths: Iterable[Path]) -> list[RecordedRun]:
    """The runs in these folders: run directories, or folders that contain them at any depth.

    Runs without a finished round are skipped; it is an error if none remains.
    """
    found: dict[Path, RecordedRun] = {}
    for path in paths:
        if not path.is_dir():
            raise FeddumapError(f"{path} is not a folder: expected run directories, or folders of them")
        for config in sorted(path.rglob("config.toml")):
            folder = config.parent
            records = read_records(folder)
            if records and folder.resolve() not in found:
                stored = read_config(folder)
                stored = stored.model_copy(update={"method": with_defaults(stored.method)})
                found[folder.resolve()] = RecordedRun(folder, stored, records, finished(folder))
    if not found:
        named = ", ".join(map(str, paths)) or "nothing"
        raise FeddumapError(
            f"no run with a finished round in {named}: expected the folder of a run or of a grid"
        )
    return list(found.values())


def group_runs(runs: Sequence[RecordedRun]) -> list[Series]:
    """Group runs by everything but the seed, in the order of first appearance.

    A second run with the same configuration and seed starts another series, labelled with its folder.
    """
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        identity = run.config.model_dump_json(exclude={"run"})
        repeat = 0
        while any(each.seed == run.seed for each in groups.get(f"{repeat} {identity}", [])):
            repeat += 1
        groups.setdefault(f"{repeat} {identity}", []).append(run)
    members = list(groups.values())
    labels = _labels([group[0].config for group in members])
    return [
        Series(_unique_label(labels, i, group[0].path), tuple(sorted(group, key=lambda run: run.seed)))
        for i, group in enumerate(members)
    ]


def _unique_label(labels: Sequence[str], place: int, path: Path) -> str:
    return f"{labels[place]} ({path})" if labels[place] in labels[:place] else labels[place]


def _labels(configs: Sequence[Config]) -> list[str]:
    """Labels: the method, the model and data if they differ among all, and other keys that differ among
    configurations with the same method, model and data."""
    flat = [_flat(config) for config in configs]
    labels = []
    for own in flat:
        parts = [own["method.name"]]
        parts += [own[key] for key in NAMES[1:] if len({other[key] for other in flat}) > 1]
        alike = [other for other in flat if all(other[key] == own[key] for key in NAMES)]
        parts += [
            f"{key.removesuffix('.name').split('.', 1)[-1]}={value}"
            for key, value in own.items()
            if key not in NAMES and any(other.get(key) != value for other in alike)
        ]
        labels.append(" ".join(map(str, parts)))
    return labels


def _flat(config: Config) -> dict[str, Any]:
    dumped = config.model_dump(exclude={"run"})
    return {f"{section}.{key}": value for section, keys in dumped.items() for key, value in keys.items()}
