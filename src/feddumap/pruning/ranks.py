"""Feature-map ranks, HRank's measure of the importance of filters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from feddumap.pruning.dependency_graph import PrunableLayer
from feddumap.training.backends import as_model
from feddumap.training.chain_model import ChainModel
from feddumap.training.model import Model
from feddumap.training.samples import Samples, to_input
from feddumap.training.torch_model import TorchModel

IMAGES = 500
CHUNK = 50


@torch.no_grad()
def feature_ranks(
    model: Model | nn.Module,
    layers: Sequence[PrunableLayer],
    samples: Samples,
    progress: Callable[[int, int], None],
) -> dict[str, list[float]]:
    """For each layer the mean matrix rank of each channel's map, after ReLU and before pooling, over at most
    500 images. If several convolutions share a channel, their ranks are averaged."""
    images = samples.images[:IMAGES]
    names = [name for layer in layers for name in layer.features]
    totals: dict[str, torch.Tensor] = {}
    for start in range(0, len(images), CHUNK):
        for name, maps in _maps(as_model(model), names, images[start : start + CHUNK]):
            ranks = torch.linalg.matrix_rank(maps).double().sum(0)
            totals[name] = totals[name] + ranks if name in totals else ranks
        progress(min(start + CHUNK, len(images)), len(images))
    return {
        layer.leader: (torch.stack([totals[name] for name in layer.features]).mean(0) / len(images)).tolist()
        for layer in layers
    }


def _maps(model: Model, names: Sequence[str], images: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The feature maps of each module, after ReLU."""
    if isinstance(model, ChainModel):
        yield from ((name, model.maps(name, images)) for name in names)
        return
    assert isinstance(model, TorchModel)
    maps: dict[str, torch.Tensor] = {}

    def store_output(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: maps.update({name: F.relu(output)})

    modules = [(name, model.network.get_submodule(name)) for name in names]
    hooks = [module.register_forward_hook(store_output(name)) for name, module in modules]
    try:
        model.network.eval()(to_input(images))
    finally:
        for hook in hooks:
            hook.remove()
    yield from maps.items()
