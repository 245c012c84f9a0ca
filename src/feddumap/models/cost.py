"""The cost of a network: multiply-adds per image and parameters, cached per architecture.

>>> lenet = full_architecture("lenet", classes=10)
>>> macs(lenet), parameters(lenet)
(651720, 62006)
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from feddumap.core.messages import Architecture
from feddumap.models.registry import INPUT_SHAPE, build, is_builtin
from feddumap.models.registry import architecture as full_architecture


class LayerCost(NamedTuple):
    """A module with parameters of its own: a row of `layer_table`. `shape` is that of its first parameter."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    macs: int


def macs(architecture: Architecture) -> int:
    """Multiply-adds of convolutions and linear layers per image; biases and activations are not counted."""
    return _count(architecture)[0]


def full_macs(architecture: Architecture) -> int:
    """Multiply-adds of the unpruned network of the same family."""
    return macs(full_architecture(architecture.family, architecture.classes))


def layer_macs(architecture: Architecture) -> dict[str, int]:
    """Multiply-adds of each convolution and linear layer, by module name."""
    return dict(_count(architecture)[1])


@lru_cache
def parameters(architecture: Architecture) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in build(architecture).parameters() if parameter.requires_grad)


def layer_table(architecture: Architecture) -> list[LayerCost]:
    """The layers with parameters, in the order of definition; their costs sum to the network's."""
    module = build(architecture)
    multiply_adds = layer_macs(architecture)
    rows = []
    for name, group in groupby(module.named_parameters(), key=lambda pair: pair[0].rpartition(".")[0]):
        owned = [parameter for _, parameter in group]
        rows.append(
            LayerCost(
                name,
                type(module.get_submodule(name)).__name__,
                tuple(owned[0].shape),
                sum(parameter.numel() for parameter in owned if parameter.requires_grad),
                multiply_adds.get(name, 0),
            )
        )
    return rows


@lru_cache
def _count(architecture: Architecture) -> tuple[int, Mapping[str, int]]:
    if is_builtin(architecture.family):
        layers = _layers(build(architecture))
        return sum(layers.values()), MappingProxyType(layers)
    return _operations(build(architecture))


@torch.no_grad()
def _layers(module: nn.Module) -> dict[str, int]:
    """Multiply-adds of convolutions and linear layers: the number of outputs times the size of a filter.

    Complete for built-in families, and avoids importing torch's counter, which takes a second or two.
    """
    layers = {n: layer for n, layer in module.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    outputs: dict[nn.Module, int] = {}
    for layer in layers.values():
        layer.register_forward_hook(lambda layer, _, output: outputs.update({layer: output.numel()}))
    module.eval()(torch.zeros(INPUT_SHAPE))
    return {name: outputs[layer] * layer.weight[0].numel() for name, layer in layers.items()}


def _operations(module: nn.Module) -> tuple[int, Mapping[str, int]]:
    """Multiply-adds of any network by torch's counter, which counts a multiply-add as two operations."""
    module = module.to("meta").eval()  # only shapes are computed
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.empty(INPUT_SHAPE, device="meta"))
    counts = {name.partition(".")[2]: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    layers = {
        name: counts.get(name, 0) // 2
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }
    return counter.get_total_flops() // 2, MappingProxyType(layers)


@lru_cache
def parameter_names(architecture: Architecture) -> tuple[str, ...]:
    """The names of the trainable tensors; the others of a state dict are buffers."""
    return tuple(name for name, _ in build(architecture).named_parameters())
