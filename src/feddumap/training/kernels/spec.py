"""Descriptions of the networks that the kernels support: plain chains of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

MOST_LAYERS = 32
LARGEST_KERNEL = 256  # height · width


@dataclass(frozen=True)
class LayerSpec:
    """A convolution and the pool and ReLU after it, or a linear layer and its ReLU."""

    name: str
    inputs: int
    outputs: int
    kernel: tuple[int, int] | None = None  # None: linear
    padding: tuple[int, int] = (0, 0)
    pool: bool = False
    relu: bool = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The layout of the weights in memory; convolutions: [output, row, column, input]."""
        return (self.outputs, *self.kernel, self.inputs) if self.kernel else (self.outputs, self.inputs)

    def encode(self, algorithm: int) -> tuple[int, ...]:
        """The layer as `fdm_create` reads it."""
        kernel, pool = self.kernel or (0, 0), 2 if self.pool else 1
        kind = 0 if self.kernel else 1
        return (kind, self.inputs, self.outputs, *kernel, *self.padding, pool, int(self.relu), algorithm)


@dataclass(frozen=True)
class ChainSpec:
    """A chain: convolutions, then linear layers (none if its outputs are feature maps)."""

    layers: tuple[LayerSpec, ...]

    def maps_of(self, name: str) -> ChainSpec:
        """The part of the chain whose outputs are the feature maps of a convolution, before its pool."""
        index = next(i for i, layer in enumerate(self.layers) if layer.name == name)
        return ChainSpec((*self.layers[:index], replace(self.layers[index], pool=False)))

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Height and width of each convolution's map, after its pool, for images of this size."""
        found = []
        for layer in self.layers:
            if layer.kernel is None:
                break
            height, width = (
                (side + 2 * pad - kernel + 1) // (2 if layer.pool else 1)
                for side, pad, kernel in zip((height, width), layer.padding, layer.kernel, strict=True)
            )
            found.append((height, width))
        return found

    def fits(self, height: int, width: int) -> bool:
        """Whether images of this size are possible: no map is empty, and the first linear layer has the right
        number of inputs."""
        sizes = self.sizes(height, width)
        if min(min(size) for size in sizes) < 1:
            return False
        last = self.layers[len(sizes) - 1]
        linear = self.layers[len(sizes) :]
        return not linear or linear[0].inputs == last.outputs * sizes[-1][0] * sizes[-1][1]


def spec_of(network: nn.Module) -> ChainSpec | None:
    """The network as a chain; None if it is not one.

    A chain is an `nn.Sequential` of float32 convolutions (stride 1, any kernel and padding), 2×2 max-pools,
    ReLUs, one `nn.Flatten` and linear layers, all with biases and trainable, none used twice.

    >>> convolution = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU()
    >>> network = nn.Sequential(*convolution, nn.Flatten(), nn.Linear(1176, 10))
    >>> [(layer.outputs, layer.pool, layer.relu) for layer in spec_of(network).layers]
    [(6, True, True), (10, False, False)]
    >>> spec_of(nn.Sequential(nn.Conv2d(3, 6, 5, stride=2), nn.Flatten(), nn.Linear(1176, 10)))
    """
    if type(network) is not nn.Sequential or _has_hooks(network):
        return None
    layers: list[LayerSpec] = []
    flat = False
    for name, module in network._modules.items():  # `named_children` skips repeated modules
        if type(module) is nn.Flatten and not flat and layers:
            flat = (module.start_dim, module.end_dim) == (1, -1)
            if not flat:
                return None
        elif (made := _layer(name, module)) is not None and flat == (made.kernel is None):
            layers.append(made)
        elif type(module) is nn.ReLU and layers:
            layers[-1] = replace(layers[-1], relu=True)
        elif not flat and layers and not layers[-1].pool and _is_pool(module):
            layers[-1] = replace(layers[-1], pool=True)
        else:
            return None
    return ChainSpec(tuple(layers)) if flat and _is_consistent(layers, list(network.parameters())) else None


def _layer(name: str, module: nn.Module) -> LayerSpec | None:
    if type(module) is nn.Linear:
        return LayerSpec(name, module.in_features, module.out_features)
    if type(module) is not nn.Conv2d or not isinstance(module.padding, tuple):
        return None
    kernel, padding = (
        (int(module.kernel_size[0]), int(module.kernel_size[1])),
        (int(module.padding[0]), int(module.padding[1])),
    )
    plain = (
        module.stride == (1, 1)
        and module.dilation == (1, 1)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and kernel[0] * kernel[1] <= LARGEST_KERNEL
    )
    return LayerSpec(name, module.in_channels, module.out_channels, kernel, padding) if plain else None


def _is_pool(module: nn.Module) -> bool:
    return type(module) is nn.MaxPool2d and (
        (module.kernel_size, module.stride) in ((2, 2), ((2, 2), (2, 2)))
        and (module.padding, module.dilation) in ((0, 1), ((0, 0), (1, 1)))
        and not module.ceil_mode
        and not module.return_indices
    )


def _has_hooks(network: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in network.modules() for kind in kinds)


def _is_consistent(layers: Sequence[LayerSpec], parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the last layer is linear, inputs match the outputs before them, and no parameters are
    shared."""
    linear = [layer for layer in layers if layer.kernel is None]
    convolutions = [layer for layer in layers if layer.kernel is not None]
    return (
        bool(linear and convolutions)
        and len(layers) <= MOST_LAYERS
        and min(min(layer.inputs, layer.outputs) for layer in layers) > 0
        and all(a.outputs == b.inputs for chain in (linear, convolutions) for a, b in zip(chain, chain[1:]))  # noqa: B905, RUF007
        and len(parameters) == 2 * len(layers)
        and all(p.requires_grad and p.dtype == torch.float32 and p.device.type == "cpu" for p in parameters)
    )
