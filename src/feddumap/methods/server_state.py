"""Tensors that a server step keeps for every parameter and that broadcasts may carry to devices."""

from __future__ import annotations

import torch

from feddumap.core.algorithm import Send
from feddumap.core.messages import ServerState, Tensors
from feddumap.models.cost import parameter_names


def zeros(state: ServerState, prefix: str) -> Tensors:
    """A zero tensor for every parameter, named `prefix` + the parameter's name."""
    names = parameter_names(state.architecture)
    return {f"{prefix}{name}": torch.zeros_like(state.weights[name]) for name in names}


def sending(prefix: str) -> Send:
    """The `send` slot: broadcasts carry the server's tensors under this prefix."""
    return lambda state: {name: t for name, t in state.steps.items() if name.startswith(prefix)}
