"""Removes filters from a network and from all tensors shaped like its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from feddumap.core.messages import Architecture, ServerState, Tensors
from feddumap.errors import FeddumapError
from feddumap.models import build, channels_of
from feddumap.pruning.dependency_graph import PrunableLayer, trace


@dataclass(frozen=True)
class PruningPlan:
    """The pruned architecture, and for each tensor the flat positions of the scalars that are kept."""

    architecture: Architecture
    kept: dict[str, torch.Tensor]

    def apply(self, tensors: Tensors) -> Tensors:
        """Prune tensors named after parameters, with or without a prefix such as `0/momentum/`."""
        result: Tensors = {}
        for name, tensor in tensors.items():
            positions = self.kept.get(name.rsplit("/", 1)[-1])
            if positions is None:
                result[name] = tensor
            else:
                result[name] = tensor.reshape(-1)[positions.reshape(-1)].reshape(positions.shape)
        return result

    def state(self, state: ServerState) -> ServerState:
        """The pruned server state: weights, mask and the tensors of the server steps."""
        return replace(
            state,
            architecture=self.architecture,
            weights=self.apply(state.weights),
            mask=self.apply(state.mask),
            steps=self.apply(state.steps),
        )


def plan(architecture: Architecture, drop: Mapping[str, Sequence[int]]) -> PruningPlan:
    """The plan that removes the given output channels of each named convolution.

    Torch-Pruning follows the channels through batch norm, sums, concatenations, depthwise convolutions and
    flattening. It prunes a network in which the value of every scalar is its own position, so the remaining
    values are the positions to keep in every tensor of that shape.
    """
    import torch_pruning

    network = build(architecture).double().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    for tensor in network.state_dict().values():
        tensor.zero_()  # uninitialized memory may hold NaN, and slow denormals
    graph = trace(network)
    outputs = _outputs(network)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float64).view_as(tensor))
    try:
        for name, channels in drop.items():
            if channels:
                convolution = network.get_submodule(name)
                prune = torch_pruning.prune_conv_out_channels
                graph.get_pruning_group(convolution, prune, list(channels)).prune()
        if _outputs(network) != outputs:
            raise FeddumapError("it would change the number of outputs")
    except Exception as error:  # a user's network may raise anything
        raise FeddumapError(f"{architecture.family} cannot be pruned: {error}") from error
    positions = {name: tensor.round().long() for name, tensor in network.state_dict().items() if tensor.dim()}
    return PruningPlan(replace(architecture, channels=channels_of(network)), positions)


def dry_run(architecture: Architecture, layers: Sequence[PrunableLayer]) -> None:
    """Plan the removal of one channel of each layer, to detect before training that it is impossible."""
    widths = architecture.widths
    plan(architecture, {layer.leader: [0] for layer in layers if widths[layer.leader] > 1})


@torch.no_grad()
def _outputs(network: torch.nn.Module) -> int:
    outputs: torch.Tensor = network.eval()(torch.zeros(1, 3, 32, 32, dtype=torch.float64))
    return outputs.shape[1]
