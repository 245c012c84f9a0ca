"""FedDUM's server side: momentum on the pseudo-gradient. Nothing more is sent than with FedAvg."""

from typing import Literal

import torch

from feddumap.core.algorithm import Metrics, RoundView, ServerStep
from feddumap.core.messages import ServerState, Tensors
from feddumap.models.cost import parameter_names


def server_momentum(beta: float, start: Literal["first", "zero"], lr: float = 1.0) -> ServerStep:
    """g = w_before − w_after, m ← β m + (1 − β) g, w ← w_before − η_s m, with η_s = 1.

    w_after is what the steps before made of the devices' models. m begins as the first g, or as zero. Batch
    norm's statistics take part in no momentum.
    """

    def init(state: ServerState) -> Tensors:
        if start == "first":
            return {}
        names = parameter_names(state.architecture)
        return {f"momentum/{name}": torch.zeros_like(state.weights[name]) for name in names}

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        kept: Tensors = {}
        moved = dict(weights)
        for name in parameter_names(view.state.architecture):
            before = view.state.weights[name]
            gradient = before - weights[name]
            known = steps.get(f"momentum/{name}")
            momentum = gradient if known is None else beta * known + (1 - beta) * gradient
            kept[f"momentum/{name}"] = momentum
            moved[name] = before - lr * momentum
        return moved, kept, {}

    return ServerStep(init, apply)
