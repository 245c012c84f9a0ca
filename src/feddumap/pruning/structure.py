"""Finds the layers whose units could be removed, those that must lose the same units, and why others cannot.

A unit is a filter of a convolution or an output of a linear layer. What is found here follows from the trace
of a network; `verification` tries it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from torch import nn
from torch.nn.modules.conv import _ConvNd

from feddumap.core.messages import Architecture, InputSpec
from feddumap.errors import FeddumapError
from feddumap.models import build
from feddumap.models.resize import group_of, is_convolution, trace, width_of

Units = Literal["filters", "all"]

OPERATIONS = {
    "glu": "GLU",
    "split": "chunk or split",
    "unbind": "unbind",
    "slice": "slicing",
    "select": "indexing",
    "indexbackward": "indexing",
    "flip": "flip",
    "roll": "roll",
    "permute": "permute",
    "transpose": "transpose",
    "view": "view or flatten",
    "pixelshuffle": "pixel shuffle",
    "softmax": "softmax",
    "bmm": "a product of activations",
    "scaleddotproduct": "attention",
    "vectornorm": "a vector norm",
}
"""Autograd's names of operations that may move units or mix them, for explanations."""


@dataclass(frozen=True)
class PrunableLayer:
    """Layers that share their units; the first is the `leader`, `followers` are depthwise convolutions.

    `features` has for each member the module whose output, after ReLU, tells how active its units are: the
    norm behind it, or itself. Those of 2-d convolutions, if there are any, are ranked by their `maps`.
    `passed` are operations on the way to `readers`, the layers that the units are inputs of.
    """

    members: tuple[str, ...]
    followers: tuple[str, ...]
    features: tuple[str, ...]
    maps: tuple[str, ...]
    linear: bool
    readers: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    @property
    def leader(self) -> str:
        return self.members[0]


@dataclass(frozen=True)
class Candidates:
    """Layers that may be prunable, and the reasons why others are not; a shared reason names all members."""

    layers: tuple[PrunableLayer, ...]
    refused: dict[str, str] = field(default_factory=dict)


@lru_cache(maxsize=16)
def candidates(architecture: Architecture, units: Units = "filters") -> Candidates:
    """The layers with units that are not outputs of the network: convolutions or, with `all`, linear layers
    too."""
    network = build(architecture)
    obstacles = obstacles_of(network)
    graph = traced(network, architecture.input)
    names: dict[Any, str] = {parameter: name for name, parameter in network.named_parameters()}
    names |= {module: name for name, module in network.named_modules()}
    roots = [(name, module) for name, module in network.named_modules() if is_convolution(module)]
    if units == "all":
        roots += [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    layers: list[PrunableLayer] = []
    refused: dict[str, str] = {}
    seen: set[str] = set()
    for name, module in roots:
        if name in seen or is_depthwise(module):
            continue
        if reason := _alone(module, name, network, graph):
            refused[name] = reason
            continue
        try:
            touched = _touched(graph, module)
        except Exception as error:  # Torch-Pruning may raise anything about operations it does not know
            refused[name] = f"its units cannot be followed ({line_of(error)})"
            continue
        outputs = [other for other, outwards in touched if outwards and width_of(other) and other in names]
        members = tuple(dict.fromkeys(names[other] for other in outputs if not is_depthwise(other)))
        seen.update(members)
        reasons = {member: _reason(touched, member, names, obstacles) for member in members}
        if any(reasons.values()):
            refused.update({member: reasons[member] for member in members if _asked(network, member, units)})
        else:
            layers.append(_layer(network, graph, names, touched, members))
    return Candidates(tuple(layers), refused)


def traced(network: nn.Module, given: InputSpec) -> Any:
    """The dependency graph of a network."""
    try:
        return trace(network, given.example(2, dtype=next(network.parameters()).dtype))
    except FeddumapError:
        raise
    except Exception as error:  # a user's network may raise anything while traced
        raise FeddumapError(f"the network cannot be traced for pruning: {line_of(error)}") from error


def is_depthwise(module: nn.Module) -> bool:
    """Whether a convolution has a filter of its own for each input channel."""
    return isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels == module.out_channels


Touched = list[tuple[Any, bool]]
"""Modules (and parameters of none) that a cut changes, and whether they lose outputs."""

Obstacles = dict[str, tuple[str, str]]
"""Why a module must stay as it is: said of itself ("it is frozen") and of it ("which is frozen")."""


def obstacles_of(network: nn.Module) -> Obstacles:
    """The modules that are frozen, or whose weights have a second name or are computed from others."""
    found: Obstacles = {}
    owners: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        owners.setdefault(id(parameter), []).append(module)
        if not parameter.requires_grad:
            frozen = ("it is frozen (requires_grad is False)", "which is frozen")
            found |= {module: frozen, name: frozen}
    for modules in owners.values():
        for module in modules if len(modules) > 1 else ():
            text = f"weights are shared with {', '.join(dict.fromkeys(m for m in modules if m != module))}"
            found[module] = (f"its {text}", f"whose {text}")
    for name, layer in network.named_modules():
        if width_of(layer) is not None and not isinstance(layer._parameters.get("weight"), nn.Parameter):
            text = "weights are computed from other tensors (a parametrization)"
            found[name] = (f"its {text}", f"whose {text}")
    return found


def _alone(module: nn.Module, name: str, network: nn.Module, graph: Any) -> str:
    """Why a layer cannot be cut, if the reason is its own."""
    if module not in graph.module2node:
        parent = network.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            return f"it is part of the attention {name.rpartition('.')[0]}"
        return "it is not called, or the outputs do not depend on it"
    if isinstance(module, _ConvNd) and module.groups > 1:
        return f"it has {module.groups} groups"
    return "it has a single unit" if width_of(module) == 1 else ""


def _touched(graph: Any, module: nn.Module) -> Touched:
    """What loses something with the units of a layer."""
    group = group_of(graph, module, range(width_of(module) or 0))
    return [(item.dep.target.module, graph.is_out_channel_pruning_fn(item.dep.handler)) for item in group]


def _asked(network: nn.Module, name: str, units: Units) -> bool:
    return units == "all" or is_convolution(network.get_submodule(name))


def _reason(touched: Touched, member: str, names: dict[Any, str], obstacles: Obstacles) -> str:
    """Why the units of a member of a group cannot be removed; empty if they can."""
    import torch_pruning

    if member in obstacles:
        return obstacles[member][0]
    width = next(width_of(other) for other, _ in touched if names.get(other) == member)
    for other, outwards in touched:
        name = names.get(other, "")
        if isinstance(other, _ConvNd) and other.groups > 1 and not is_depthwise(other):
            return f"its channels run through {name}, which has {other.groups} groups"
        if isinstance(other, nn.GroupNorm) and other.num_groups > 1:
            return f"its channels run through {name}, which normalises in {other.num_groups} groups"
        if isinstance(other, nn.Embedding | nn.MultiheadAttention | nn.RNNBase):
            return f"its units are tied to {name} ({type(other).__name__}), which is not cut"
        if name and name in obstacles:
            return f"its units run through {name}, {obstacles[name][1]}"
        if outwards and name and width_of(other) not in (None, width):
            return f"its units are tied to those of {name}, which has another number of them"
    what = "channels" if is_convolution(touched[0][0]) else "units"
    reads = any(not outwards and width_of(other) is not None for other, outwards in touched)
    ends = any(isinstance(other, torch_pruning.ops._OutputOp) for other, _ in touched)
    return "" if reads and not ends else f"its {what} are the network's outputs"


def _layer(
    network: nn.Module,
    graph: Any,
    names: dict[Any, str],
    touched: Touched,
    members: tuple[str, ...],
) -> PrunableLayer:
    modules = {name: network.get_submodule(name) for name in members}
    features = {name: names[_feature(graph, module)] for name, module in modules.items()}
    known = [(other, out) for other, out in touched if isinstance(other, nn.Module) and other in names]
    plane = (nn.Conv2d, nn.ConvTranspose2d)
    return PrunableLayer(
        members=members,
        followers=tuple(dict.fromkeys(names[other] for other, out in known if out and is_depthwise(other))),
        features=tuple(features.values()),
        maps=tuple(features[name] for name, module in modules.items() if isinstance(module, plane)),
        linear=not any(map(is_convolution, modules.values())),
        readers=tuple(dict.fromkeys(names[other] for other, out in known if width_of(other) and not out)),
        passed=tuple(dict.fromkeys(word for m in modules.values() for word in _passed(graph, m))),
    )


def _feature(graph: Any, module: nn.Module) -> nn.Module:
    """The norm right behind a layer, of the same order of dimensions, or the layer itself."""
    kinds: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.LayerNorm)
    if is_convolution(module):
        kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
    behind = list(graph.module2node[module].outputs)
    while len(behind) == 1 and _inside_instance_norm(behind[0]):
        behind = list(behind[0].outputs)
    return next((node.module for node in behind if isinstance(node.module, kinds)), module)


def _inside_instance_norm(node: Any) -> bool:
    """Whether an operation may be one of those that instance norm consists of."""
    name = node.grad_fn.name().lower() if hasattr(node.grad_fn, "name") else ""
    known = isinstance(node.module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm)
    return not known and any(word in name for word in ("view", "clone", "batchnorm"))


def _passed(graph: Any, module: nn.Module) -> Iterator[str]:
    """The operations that a layer's units pass before the next layer."""
    waiting, seen = list(graph.module2node[module].outputs), set()
    while waiting:
        node = waiting.pop(0)
        if node in seen or width_of(node.module) is not None:
            continue
        seen.add(node)
        waiting += node.outputs
        name = node.grad_fn.name().lower() if hasattr(node.grad_fn, "name") else ""
        yield from (word for key, word in OPERATIONS.items() if key in name)


def line_of(error: BaseException) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).splitlines()), type(error).__name__)
