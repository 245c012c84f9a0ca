"""The tensors of a network by name. A tensor with several names (shared modules, tied parameters) is handled
once, under its first name."""

from collections.abc import Mapping

import torch
from torch import nn

from feddumap.core.messages import Tensors
from feddumap.errors import FeddumapError


def state_of(module: nn.Module) -> Tensors:
    """The parameters and persistent buffers, as views.

    >>> layer = nn.Linear(2, 2)
    >>> list(state_of(nn.Sequential(layer, nn.ReLU(), layer)))
    ['0.weight', '0.bias']
    """
    found: Tensors = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, each once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def frozen(module: nn.Module) -> frozenset[str]:
    """The names of the parameters that do not require gradients."""
    return frozenset(n for n, parameter in module.named_parameters() if not parameter.requires_grad)


@torch.no_grad()
def load_state(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Copy weights and constants into a network; together they must be the tensors of `state_of`."""
    own, given = state_of(module), {**(constants or {}), **weights}
    for name in own:
        if name not in given:
            raise FeddumapError(f"the tensor {name} is missing: give all weights and buffers of the network")
    for name, tensor in given.items():
        if name not in own:
            raise FeddumapError(f"there is a tensor {name}, which the network does not have: remove it")
        if own[name].shape != tensor.shape:
            raise FeddumapError(
                f"{name} has the shape {list(tensor.shape)}, expected {list(own[name].shape)}: give the "
                "weights of this network"
            )
    for name, tensor in own.items():
        tensor.copy_(given[name])
