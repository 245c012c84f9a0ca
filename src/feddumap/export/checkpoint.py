"""What is exported: the global model of a run's newest good checkpoint, and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from feddumap.config import Config
from feddumap.data.sources import catalog
from feddumap.data.sources.download import Say
from feddumap.engine.rounds import in_use
from feddumap.errors import FeddumapError
from feddumap.export.metadata import Metadata
from feddumap.models import network
from feddumap.models.cost import macs
from feddumap.runs.directory import Saved, read_checkpoint, read_config, read_records

IMAGES = 32  # test images that a file is compared on


@dataclass(frozen=True)
class TrainedModel:
    """A network in eval mode, its card, and some test images (bytes [n, h, w, c]; perhaps none)."""

    network: nn.Module
    card: Metadata
    images: torch.Tensor


def read(directory: Path, say: Say) -> TrainedModel:
    """The newest good model of a run directory, which may be in training meanwhile."""
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
        "parameters": in_use(state),
        "macs": macs(state.architecture),
    }
    module = network(state.architecture, state.weights).eval()
    return TrainedModel(module, Metadata(state.architecture, classes, run), images)


def _newest(directory: Path, say: Say) -> Saved:
    while True:
        paths = _checkpoints(directory)
        damaged = []
        for path in paths:
            try:
                saved = read_checkpoint(path)
            except FeddumapError as error:
                if path.exists():  # a run in training drops its older ones
                    damaged.append(str(error))
                continue
            if damaged:
                say(f"{'; '.join(damaged)}: exporting the model after {saved.state.round} rounds")
            return saved
        if paths == _checkpoints(directory):
            break
    if damaged:
        raise FeddumapError(
            f"{directory} has no good checkpoint ({'; '.join(damaged)}): make one with "
            f"`feddumap resume {directory}`"
        )
    raise FeddumapError(
        f"{directory} has no checkpoint yet: wait for the first round, or `feddumap resume {directory}`"
    )


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("checkpoint-*.json"), reverse=True)


def _classes_and_images(config: Config, count: int, say: Say) -> tuple[tuple[str, ...], torch.Tensor]:
    """The classes' names and some test images, as far as they are at hand: nothing is downloaded."""
    name = config.data.name
    none = torch.empty(0, 32, 32, 3, dtype=torch.uint8)
    try:
        cached = name == "digits" or catalog.cache_folder(name).exists()
    except FeddumapError:  # the .npz file is gone, which is said below
        cached = False
    if cached:
        dataset = catalog.get(name)
        classes, images = dataset.classes, torch.from_numpy(dataset.test_images[:IMAGES].copy())
    elif name in catalog.PUBLISHED:
        classes, images = catalog.PUBLISHED[name].classes, none
        say(f"{name} is not in the cache: the file is compared on random images alone")
    else:
        classes, images = tuple(map(str, range(count))), none
        say(f"{name} is not in the cache: the classes are numbered, the file is compared on random images")
    if len(classes) != count:
        raise FeddumapError(
            f"{name} has {len(classes)} classes, the model {count}: put back the data that it was trained on"
        )
    return classes, images
