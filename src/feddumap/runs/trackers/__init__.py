"""Trackers of runs, each behind a key of [run]: TensorBoard, Weights & Biases, MLflow.

A module here has `require()`, an error if its package is missing, and `start(directory, config, records)`,
which opens the tracker with the records so far. None shows a round twice, however often a run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from feddumap.config import Config
from feddumap.errors import FeddumapError
from feddumap.runs.directory import RunDirectory
from feddumap.runs.trackers import mlflow, tensorboard, wandb
from feddumap.runs.trackers.base import Tracker

TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


def check(config: Config) -> None:
    """Raise an error if the package of a tracker in use is missing."""
    for name, module in TRACKERS.items():
        if getattr(config.run, name):
            module.require()


def start(
    config: Config, directory: RunDirectory | None, records: Sequence[Mapping[str, Any]]
) -> list[Tracker]:
    """The trackers of a run, opened."""
    opened: list[Tracker] = []
    for name, module in TRACKERS.items():
        if not getattr(config.run, name):
            continue
        if directory is None:
            raise FeddumapError(f"run.{name} = true needs a run directory to write in: give `out`")
        opened.append(module.start(directory, config, records))
    return opened
