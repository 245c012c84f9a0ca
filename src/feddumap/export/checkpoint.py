"""The model to export: the global model of a run's newest valid checkpoint, and its metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from feddumap.config import Config
from feddumap.data.sources import catalog
from feddumap.engine.rounds import active_parameters
from feddumap.errors import FeddumapError
from feddumap.export.metadata import Metadata
from feddumap.models import network
from feddumap.models.cost import macs
from feddumap.runs.reader import Checkpoint, read_checkpoint, read_config, read_records
from feddumap.system.callbacks import Say

IMAGES = 32  # test images to compare outputs on


@dataclass(frozen=True)
class TrainedModel:
    """A network in eval mode, its metadata, and test images (uint8 [n, h, w, c]; possibly none)."""

    network: nn.Module
    metadata: Metadata
    images: torch.Tensor


def read(directory: Path, say: Say) -> TrainedModel:
    """The newest valid model of a run directory; the run may be in training."""
    config = read_config(directory)
    state = _newest(directory, say).state
    classes, images = _classes_and_images(config, state.architecture.classes, say)
    records = read_records(directory)[: state.round]
    run = {
        "method": config.method.name,
        "model": config.model.name,
        "data": Path(config.data.name).name,
        "seed": config.run.seed,
        "rounds": state.round,
        "accuracy": records[-1]["accuracy"] if len(records) == state.round > 0 else None,
        "parameters": active_parameters(state),
        "macs": macs(state.architecture),
    }
    module = network(state.architecture, state.weights).eval()
    return TrainedModel(module, Metadata(state.architecture, classes, run), images)


def _newest(directory: Path, say: Say) -> Checkpoint:
    while True:
        paths = _checkpoints(directory)
        damaged = []
        for path in paths:
            try:
                saved = read_checkpoint(path)
            except FeddumapError as error:
                if path.exists():  # a run in training deletes old checkpoints
                    damaged.append(str(error))
                continue
            if damaged:
                say(f"{'; '.join(damaged)}: exporting the model after {saved.state.round} rounds")
            return saved
        if paths == _checkpoints(directory):
            break
    if damaged:
        raise FeddumapError(
            f"{directory} has no valid checkpoint ({'; '.join(damaged)}): run `feddumap resume {directory}`"
        )
    raise FeddumapError(
        f"{directory} has no checkpoint yet: wait for the first round or run `feddumap resume {directory}`"
    )


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("checkpoint-*.json"), reverse=True)


def _classes_and_images(config: Config, count: int, say: Say) -> tuple[tuple[str, ...], torch.Tensor]:
    """Class names and test images of a cached data set; nothing is downloaded."""
    name = config.data.name
    none = torch.empty(0, 32, 32, 3, dtype=torch.uint8)
    try:
        cached = name == "digits" or catalog.cache_folder(name).exists()
    except FeddumapError:  # the .npz file is gone; reported below
        cached = False
    if cached:
        dataset = catalog.get(name)
        classes, images = dataset.classes, torch.from_numpy(dataset.test_images[:IMAGES].copy())
    elif name in catalog.PUBLISHED:
        classes, images = catalog.PUBLISHED[name].classes, none
        say(f"{name} is not cached: outputs are compared on random images only")
    else:
        classes, images = tuple(map(str, range(count))), none
        say(f"{name} is not cached: classes are numbered, outputs are compared on random images only")
    if len(classes) != count:
        raise FeddumapError(
            f"{name} has {len(classes)} classes, the model {count}: restore the data set it was trained on"
        )
    return classes, images
