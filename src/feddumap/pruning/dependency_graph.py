"""Finds the convolutions whose filters can be removed, and those that must lose the same filters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from feddumap.core.messages import Architecture
from feddumap.errors import FeddumapError
from feddumap.models import INPUT_SHAPE, build


@dataclass(frozen=True)
class PrunableLayer:
    """Convolutions that share their output channels; the first is the `leader`, `followers` are depthwise.

    `features` has for each member the module whose output, after ReLU, is its feature map: its batch norm, or
    itself.
    """

    members: tuple[str, ...]
    followers: tuple[str, ...]
    features: tuple[str, ...]

    @property
    def leader(self) -> str:
        return self.members[0]


@dataclass(frozen=True)
class PrunableLayers:
    """The layers of a network that can be pruned, and the reasons why other convolutions cannot."""

    layers: tuple[PrunableLayer, ...]
    refused: dict[str, str] = field(default_factory=dict)

    def choose(self, *, coupled: bool) -> tuple[PrunableLayer, ...]:
        """The layers of a single convolution and, with `coupled`, those of several."""
        chosen = tuple(layer for layer in self.layers if coupled or len(layer.members) == 1)
        if not chosen:
            reasons = [f"{name}: {reason}" for name, reason in self.refused.items()]
            reasons += [f"{', '.join(layer.members)} share channels" for layer in self.layers]
            raise FeddumapError(
                f"no convolution of this network can be pruned ({'; '.join(reasons) or 'it has none'}); use "
                "a method without pruning, or set method.coupled=true to prune those that share channels"
            )
        return chosen


def trace(network: nn.Module) -> Any:
    """Torch-Pruning's dependency graph of a network."""
    import torch_pruning

    example = torch.zeros(INPUT_SHAPE, dtype=next(network.parameters()).dtype)
    try:
        with torch.enable_grad():
            return torch_pruning.DependencyGraph().build_dependency(
                network.eval(), example_inputs=example, verbose=False
            )
    except Exception as error:  # a user's network may raise anything while traced
        raise FeddumapError(f"the network cannot be traced for pruning: {error}") from error


@lru_cache(maxsize=8)
def prunable(architecture: Architecture) -> PrunableLayers:
    """The prunable layers of an architecture."""
    import torch_pruning

    network = build(architecture)
    graph = trace(network)
    names = {module: name for name, module in network.named_modules()}
    layers: list[PrunableLayer] = []
    refused: dict[str, str] = {}
    seen: set[str] = set()
    for name, module in network.named_modules():
        if not isinstance(module, nn.Conv2d) or name in seen:
            continue
        if module.groups > 1:
            if not _depthwise(module):
                refused[name] = f"it has {module.groups} groups"
            continue
        group = graph.get_pruning_group(module, torch_pruning.prune_conv_out_channels, [0])
        touched = [
            (item.dep.target.module, graph.is_out_channel_pruning_fn(item.dep.handler)) for item in group
        ]
        coupled = [
            other
            for other, outwards in touched
            if isinstance(other, nn.Conv2d) and outwards and other in names
        ]
        members = tuple(dict.fromkeys(names[other] for other in coupled if other.groups == 1))
        followers = tuple(dict.fromkeys(names[other] for other in coupled if _depthwise(other)))
        seen.update(members)
        reason = _reason(touched, names)
        if reason:
            refused.update(dict.fromkeys(members, reason))
        else:
            features = tuple(_feature(graph, network.get_submodule(member), names) for member in members)
            layers.append(PrunableLayer(members, followers, features))
    return PrunableLayers(tuple(layers), refused)


def _depthwise(module: nn.Conv2d) -> bool:
    return module.groups > 1 and module.groups == module.in_channels == module.out_channels


def _reason(touched: list[tuple[Any, bool]], names: dict[nn.Module, str]) -> str:
    """Why the channels cannot be removed; empty if they can."""
    for other, _ in touched:
        if isinstance(other, nn.Conv2d) and other.groups > 1 and not _depthwise(other):
            return f"its channels run through {names[other]}, which has {other.groups} groups"
    if not any(isinstance(other, nn.Conv2d | nn.Linear) and not outwards for other, outwards in touched):
        return "its channels are the network's outputs"
    return ""


def _feature(graph: Any, module: nn.Module, names: dict[nn.Module, str]) -> str:
    outputs = [node.module for node in graph.module2node[module].outputs]
    norms = [other for other in outputs if isinstance(other, nn.BatchNorm2d)]
    return names[norms[0] if norms else module]
