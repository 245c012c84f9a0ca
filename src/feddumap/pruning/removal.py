"""Removing filters for good: from the network, and from everything shaped like its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from feddumap.core.messages import Architecture, ServerState, Tensors
from feddumap.errors import FeddumapError
from feddumap.models import build, channels_of
from feddumap.pruning.dependency_graph import Layer, trace


@dataclass(frozen=True)
class Cut:
    """The architecture that is left, and for each tensor which of its scalars stay (flat positions)."""

    architecture: Architecture
    kept: dict[str, torch.Tensor]

    def apply(self, tensors: Tensors) -> Tensors:
        """Cut tensors that carry parameter names, with or without a prefix such as `0/momentum/`."""
        result: Tensors = {}
        for name, tensor in tensors.items():
            positions = self.kept.get(name.rsplit("/", 1)[-1])
            if positions is None:
                result[name] = tensor
            else:
                result[name] = tensor.reshape(-1)[positions.reshape(-1)].reshape(positions.shape)
        return result

    def state(self, state: ServerState) -> ServerState:
        """The server's state after the cut: weights, mask and the steps' own tensors shrink alike."""
        return replace(
            state,
            architecture=self.architecture,
            weights=self.apply(state.weights),
            mask=self.apply(state.mask),
            steps=self.apply(state.steps),
        )


def plan(architecture: Architecture, drop: Mapping[str, Sequence[int]]) -> Cut:
    """What is left when each named convolution loses the given output channels.

    Torch-Pruning follows the channels through batch norm, sums, concatenations, depthwise convolutions and
    flattening. To learn what it removes, it is given a network in which every scalar is its own position:
    those still there afterwards are the ones to keep, in whatever has that tensor's shape.
    """
    import torch_pruning

    network = build(architecture).double().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    for tensor in network.state_dict().values():
        tensor.zero_()  # memory that was never set may hold NaN, and slow denormals
    graph = trace(network)
    outputs = _outputs(network)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float64).view_as(tensor))
    try:
        for name, channels in drop.items():
            if channels:
                convolution = network.get_submodule(name)
                cutter = torch_pruning.prune_conv_out_channels
                graph.get_pruning_group(convolution, cutter, list(channels)).prune()
        if _outputs(network) != outputs:
            raise FeddumapError("it would change the number of outputs")
    except Exception as error:  # whatever goes wrong inside, the network is not ours
        raise FeddumapError(f"{architecture.family} cannot be pruned: {error}") from error
    positions = {name: tensor.round().long() for name, tensor in network.state_dict().items() if tensor.dim()}
    return Cut(replace(architecture, channels=channels_of(network)), positions)


def try_out(architecture: Architecture, layers: Sequence[Layer]) -> None:
    """Cut one channel of each layer, for nothing: a network that cannot be cut is refused before training."""
    widths = architecture.widths
    plan(architecture, {layer.leader: [0] for layer in layers if widths[layer.leader] > 1})


@torch.no_grad()
def _outputs(network: torch.nn.Module) -> int:
    outputs: torch.Tensor = network.eval()(torch.zeros(1, 3, 32, 32, dtype=torch.float64))
    return outputs.shape[1]
