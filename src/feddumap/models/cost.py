"""The cost of a network: multiply-adds per sample and parameters, cached per architecture.

>>> from feddumap.models.registry import architecture
>>> lenet = architecture("lenet", classes=10)
>>> macs(lenet), parameters(lenet)
(651720, 62006)
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from feddumap.core.messages import Architecture
from feddumap.models.registry import build, is_builtin, unpruned
from feddumap.models.state import trainable

LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class LayerCost(NamedTuple):
    """A module with parameters or multiply-adds of its own, without its submodules': a row of `layer_table`.
    `shape` is that of its first parameter."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    macs: int


def macs(architecture: Architecture) -> int:
    """Multiply-adds of one sample's convolutions and matrix products (linear layers, attention, recurrent
    layers); biases, activations, norms, sums and look-ups in embeddings are not counted."""
    return _count(architecture)[0]


def full_macs(architecture: Architecture) -> int:
    """Multiply-adds of the unpruned network of the same family."""
    return macs(unpruned(architecture))


def layer_macs(architecture: Architecture) -> dict[str, int]:
    """Multiply-adds of each convolution and linear layer, by module name."""
    modules = dict(build(architecture).named_modules())
    return {name: n for name, n in _count(architecture)[1].items() if isinstance(modules[name], LAYERS)}


@lru_cache
def parameters(architecture: Architecture) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in build(architecture).parameters() if parameter.requires_grad)


def layer_table(architecture: Architecture) -> list[LayerCost]:
    """The modules with parameters or multiply-adds of their own, in the order of definition; their costs sum
    to the network's. A tied parameter belongs to the module that is defined first."""
    multiply_adds = _count(architecture)[1]
    counted: set[nn.Parameter] = set()
    rows = []
    for name, module in build(architecture).named_modules():
        owned = [parameter for parameter in module.parameters(recurse=False) if parameter not in counted]
        counted.update(owned)
        if owned or multiply_adds.get(name):
            shape = tuple(owned[0].shape) if owned else ()
            count = sum(parameter.numel() for parameter in owned if parameter.requires_grad)
            rows.append(LayerCost(name, type(module).__name__, shape, count, multiply_adds.get(name, 0)))
    return rows


@lru_cache
def _count(architecture: Architecture) -> tuple[int, Mapping[str, int]]:
    if is_builtin(architecture.family):
        layers = _layers(build(architecture), architecture.input.example())
        return sum(layers.values()), MappingProxyType(layers)
    return _operations(build(architecture), architecture.input.example())


@torch.no_grad()
def _layers(module: nn.Module, example: torch.Tensor) -> dict[str, int]:
    """Multiply-adds of convolutions and linear layers: the number of outputs times the size of a filter.

    Complete for built-in families, and avoids importing torch's counter, which takes a second or two.
    """
    layers = {n: layer for n, layer in module.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    outputs: dict[nn.Module, int] = {}
    for layer in layers.values():
        layer.register_forward_hook(lambda layer, _, output: outputs.update({layer: output.numel()}))
    module.eval()(example)
    return {name: outputs[layer] * layer.weight[0].numel() for name, layer in layers.items()}


def _operations(module: nn.Module, example: torch.Tensor) -> tuple[int, Mapping[str, int]]:
    """Multiply-adds of any network by torch's counter, which counts a multiply-add as two operations: in
    total, and of each module without its submodules."""
    own: dict[str, int] = {}
    stack: list[list[int]] = [[0, 0]]  # of each module under way: the count at its start, its submodules'
    with _plain_operations(), torch.no_grad(), FlopCounterMode(display=False) as counter:

        def enter(*_: object) -> None:
            stack.append([counter.get_total_flops(), 0])

        def leave(name: str, *_: object) -> None:
            start, inside = stack.pop()
            spent = counter.get_total_flops() - start
            own[name] = own.get(name, 0) + spent - inside
            stack[-1][1] += spent

        for name, layer in module.named_modules():
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(partial(leave, name), always_call=True)
        module.eval()(example)
    counts = {name: count // 2 for name, count in own.items() if count or _is_layer(module, name)}
    return counter.get_total_flops() // 2, MappingProxyType(counts)


@contextmanager
def _plain_operations() -> Iterator[None]:
    """A context in which attention and recurrent layers consist of operations that the counter knows."""
    mha, mkldnn = torch.backends.mha, torch.backends.mkldnn
    before = mha.get_fastpath_enabled(), mkldnn.enabled
    mha.set_fastpath_enabled(False)
    mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(before[0])
        mkldnn.enabled = before[1]


def _is_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name), LAYERS)


@lru_cache
def parameter_names(architecture: Architecture) -> tuple[str, ...]:
    """The names of the trainable tensors; the other weights are buffers."""
    return tuple(trainable(build(architecture)))
