"""The importance of units: HRank's feature-map ranks and, where there are no maps, mean activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from feddumap.core.messages import Architecture, Tensors
from feddumap.errors import FeddumapError
from feddumap.models import network
from feddumap.pruning.structure import PrunableLayer
from feddumap.system.callbacks import Steps
from feddumap.training.backends import Kernels, as_model, make_model
from feddumap.training.chain_model import ChainModel
from feddumap.training.model import Model
from feddumap.training.samples import Samples, to_input
from feddumap.training.torch_model import TorchModel

IMAGES = 500
CHUNK = 50


def unit_ranks(
    architecture: Architecture,
    weights: Tensors,
    kernels: Kernels | None,
    layers: Sequence[PrunableLayer],
    samples: Samples,
    progress: Steps,
) -> dict[str, list[float]]:
    """`feature_ranks` of the network with these weights; the maps come from the kernels if it trains with
    those, activations of linear layers always from torch."""
    chain = kernels == "c"
    mapped = [layer for layer in layers if layer.maps or not chain]
    others = [layer for layer in layers if not (layer.maps or not chain)]
    total = min(len(samples), IMAGES)
    every = total * (bool(mapped) + bool(others))
    found: dict[str, list[float]] = {}
    if mapped:
        model = make_model(architecture, weights, kernels)
        found |= feature_ranks(model, mapped, samples, lambda done, _: progress(done, every))
    if others:
        plain = network(architecture, weights)
        found |= feature_ranks(plain, others, samples, lambda done, _: progress(done + every - total, every))
    return {layer.leader: found[layer.leader] for layer in layers}


@torch.no_grad()
def feature_ranks(
    model: Model | nn.Module,
    layers: Sequence[PrunableLayer],
    samples: Samples,
    progress: Steps,
) -> dict[str, list[float]]:
    """For each layer a number for each unit, over at most 500 samples: the mean matrix rank of its map, after
    ReLU and before pooling, or its mean activation after ReLU if the layer has no 2-d maps. If several layers
    share a unit, their numbers are averaged; then maps alone count if there are any."""
    images = samples.inputs[:IMAGES]
    used = {layer.leader: layer.maps or layer.features for layer in layers}
    maps = {name for layer in layers for name in layer.maps}
    names = list(dict.fromkeys(name for features in used.values() for name in features))
    totals: dict[str, torch.Tensor] = {}
    for start in range(0, len(images), CHUNK):
        for name, output in _outputs(as_model(model), names, images[start : start + CHUNK]):
            numbers = torch.linalg.matrix_rank(output).double() if name in maps else _activations(output)
            totals[name] = totals[name] + numbers.sum(0) if name in totals else numbers.sum(0)
        progress(min(start + CHUNK, len(images)), len(images))
    if missing := [name for name in names if name not in totals]:
        raise FeddumapError(
            f"{missing[0]} was not called in the forward pass, so its units cannot be ranked: name it in "
            "method.keep"
        )
    return {
        leader: (torch.stack([totals[name] for name in features]).mean(0) / len(images)).tolist()
        for leader, features in used.items()
    }


def _activations(output: torch.Tensor) -> torch.Tensor:
    """The mean over all positions of [n, unit, …]."""
    return output.double().reshape(*output.shape[:2], -1).mean(2)


def _outputs(model: Model, names: Sequence[str], images: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The outputs [n, unit, …] of each module, after ReLU."""
    if isinstance(model, ChainModel):
        yield from ((name, model.maps(name, images)) for name in names)
        return
    assert isinstance(model, TorchModel)
    outputs: dict[str, torch.Tensor] = {}

    def store_output(name: str) -> Callable[..., None]:
        def store(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            last = isinstance(module, nn.Linear | nn.LayerNorm)
            outputs[name] = F.relu(output.movedim(-1, 1) if last else output)

        return store

    modules = [(name, model.network.get_submodule(name)) for name in names]
    hooks = [module.register_forward_hook(store_output(name)) for name, module in modules]
    try:
        model.network.eval()(to_input(images))
    finally:
        for hook in hooks:
            hook.remove()
    yield from outputs.items()
