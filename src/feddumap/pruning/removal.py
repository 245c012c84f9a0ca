"""Removes units from a network and from all tensors shaped like its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from feddumap.core.messages import Architecture, InputSpec, ServerState, Tensors
from feddumap.errors import FeddumapError
from feddumap.models import build, channels_of, state_of
from feddumap.models.frozen import constants_of, with_constants
from feddumap.models.resize import group_of, widths_of
from feddumap.pruning.structure import traced


@dataclass(frozen=True)
class PruningPlan:
    """The pruned architecture, and for each tensor its shape before and the flat positions of the scalars
    that are kept."""

    architecture: Architecture
    shapes: dict[str, torch.Size]
    kept: dict[str, torch.Tensor]

    def apply(self, tensors: Tensors) -> Tensors:
        """Prune tensors named after parameters and of their shapes, with or without a prefix such as
        `0/momentum/`."""
        result: Tensors = {}
        for name, tensor in tensors.items():
            own = name.rsplit("/", 1)[-1]
            if own not in self.kept or tensor.shape != self.shapes[own]:
                result[name] = tensor
            else:
                positions = self.kept[own]
                result[name] = tensor.reshape(-1)[positions.reshape(-1)].reshape(positions.shape)
        return result

    def state(self, state: ServerState) -> ServerState:
        """The pruned server state: weights, mask, the tensors of the server steps and the frozen ones."""
        constants = self.apply(constants_of(state.architecture))
        return replace(
            state,
            architecture=with_constants(self.architecture, constants),
            weights=self.apply(state.weights),
            mask=self.apply(state.mask),
            steps=self.apply(state.steps),
        )


def plan(architecture: Architecture, drop: Mapping[str, Sequence[int]]) -> PruningPlan:
    """The plan that removes the given units of each named layer.

    Torch-Pruning follows the units through norms, sums, concatenations, depthwise convolutions and
    flattening. It prunes a network in which the value of every scalar is its own position, so the remaining
    values are the positions to keep in every tensor of that shape.
    """
    network = build(architecture).double().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    shapes = {name: tensor.shape for name, tensor in state_of(network).items()}
    floats = {name for name, tensor in state_of(network).items() if tensor.is_floating_point()}
    for parameter in network.parameters():
        parameter.detach().zero_()  # uninitialized memory may hold NaN, and slow denormals
    graph = traced(network, architecture.input)
    outputs, before = _outputs(network, architecture.input), widths_of(network)
    try:
        with torch.no_grad():
            for name, tensor in state_of(network).items():
                if name in floats:
                    tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float64).view_as(tensor))
        for name, units in drop.items():
            if units:
                group_of(graph, network.get_submodule(name), units).prune()
        positions = {
            name: tensor.round().long()
            for name, tensor in state_of(network).items()
            if name in floats and tensor.dim()
        }
        if _outputs(network, architecture.input) != outputs:
            raise FeddumapError("it would change the number of outputs")
    except Exception as error:  # a user's network may raise anything
        raise FeddumapError(f"{architecture.family} cannot be pruned: {error}") from error
    after = widths_of(network)
    narrowed = architecture.widths.keys() | {name for name in after if after[name] != before[name]}
    return PruningPlan(replace(architecture, channels=channels_of(network, narrowed)), shapes, positions)


@torch.no_grad()
def _outputs(network: torch.nn.Module, given: InputSpec) -> int:
    outputs: torch.Tensor = network.eval()(given.example(2, dtype=torch.float64))
    return outputs.shape[1]
