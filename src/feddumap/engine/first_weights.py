"""The weights before round 0."""

from __future__ import annotations

from pathlib import Path

from feddumap.config import Config
from feddumap.core.messages import Architecture, Tensors
from feddumap.core.object_names import is_object
from feddumap.errors import FeddumapError
from feddumap.models import initialise
from feddumap.models.weights import read_weights
from feddumap.runs import integrity
from feddumap.runs.directory import RunDirectory


def initial_weights(shape: Architecture, config: Config, directory: RunDirectory | None) -> Tensors:
    """The weights before round 0, with those that are frozen: the network's initialization, or those of
    `model.weights`; from the copy in the run directory if there is one."""
    weights = initialise(shape, config.run.seed)
    own = is_object(config.model.name)
    if own and directory is not None and directory.initial_weights.exists():
        integrity.require_sealed(directory.initial_weights)
        try:
            return read_weights(directory.initial_weights, weights)
        except FeddumapError as error:
            raise FeddumapError(
                f"{directory.path} holds a run of another network ({error}): pass the same one, or give "
                "another `out`"
            ) from None
    if config.model.weights is None:
        return weights
    if directory is None:
        return read_weights(Path(config.model.weights), weights)
    integrity.require_sealed(directory.initial_weights)
    return read_weights(directory.initial_weights, weights)
