"""The model to export: the global model of a run's newest valid checkpoint, and its metadata."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from feddumap.config import Config
from feddumap.core.messages import Architecture
from feddumap.data.sources import catalog
from feddumap.engine.rounds import active_parameters
from feddumap.errors import FeddumapError
from feddumap.export.metadata import Metadata
from feddumap.models import network
from feddumap.models.cost import macs
from feddumap.runs import integrity
from feddumap.runs.reader import read_config, read_records
from feddumap.system.callbacks import Say

INPUTS = 32  # test samples to compare outputs on


@dataclass(frozen=True)
class TrainedModel:
    """A network in eval mode, its metadata, and test inputs as stored (possibly none)."""

    network: nn.Module
    metadata: Metadata
    inputs: torch.Tensor


def read(directory: Path, say: Say) -> TrainedModel:
    """The newest valid model of a run directory; the run may be in training."""
    config = read_config(directory)
    state = integrity.newest(directory, say).state
    classes, inputs = _classes_and_inputs(config, state.architecture, say)
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
    whole = replace(state.architecture, frozen="")  # an export has all tensors
    return TrainedModel(module, Metadata(whole, classes, run), inputs)


def _classes_and_inputs(
    config: Config, shape: Architecture, say: Say
) -> tuple[tuple[str, ...], torch.Tensor]:
    """Class names and test inputs of a cached data set; nothing is downloaded."""
    name, count = config.data.name, shape.classes
    none = shape.input.example(0)
    try:
        cached = name == "digits" or catalog.cache_folder(config.data).exists()
    except FeddumapError:  # the file, or the code that makes the data set, is gone; reported below
        cached = False
    if cached:
        dataset = catalog.get(config.data)
        classes, inputs = dataset.classes, torch.from_numpy(dataset.test_inputs[:INPUTS].copy())
    elif name in catalog.PUBLISHED:
        classes, inputs = catalog.PUBLISHED[name].classes, none
        say(f"{name} is not cached: outputs are compared on random inputs only")
    else:
        classes, inputs = tuple(map(str, range(count))), none
        say(f"{name} is not cached: classes are numbered, outputs are compared on random inputs only")
    if len(classes) != count:
        raise FeddumapError(
            f"{name} has {len(classes)} classes, the model {count}: restore the data set it was trained on"
        )
    if cached and dataset.input != shape.input:
        raise FeddumapError(
            f"{name} has {dataset.input.describe()}, the model takes {shape.input.describe()}: restore the "
            "data set it was trained on"
        )
    return classes, inputs
