"""FedOpt: adaptive optimisers on the server, with the mean update of the devices as their gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from feddumap.core.algorithm import Metrics, RoundView, ServerStep
from feddumap.core.messages import ServerState, Tensors
from feddumap.models.cost import parameter_names

Second = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""From v, Δ² and β₂ to the next v."""


def adagrad(v: torch.Tensor, square: torch.Tensor, _: float) -> torch.Tensor:
    """v ← v + Δ²."""
    return v + square


def adam(v: torch.Tensor, square: torch.Tensor, beta: float) -> torch.Tensor:
    """v ← β₂ v + (1 − β₂) Δ²."""
    return beta * v + (1 - beta) * square


def yogi(v: torch.Tensor, square: torch.Tensor, beta: float) -> torch.Tensor:
    """v ← v − (1 − β₂) Δ² sign(v − Δ²)."""
    return v - (1 - beta) * square * torch.sign(v - square)


def fedopt(second: Second, lr: float, beta1: float, beta2: float, tau: float) -> ServerStep:
    """Δ = w½ − w, m ← β₁ m + (1 − β₁) Δ, v as the optimiser says, w ← w + η m / (√v + τ).

    As in Reddi et al.'s Algorithm 2: m starts at 0 and v at τ², and there is no bias correction. Batch norm's
    statistics are the devices' mean.
    """

    def init(state: ServerState) -> Tensors:
        steps: Tensors = {}
        for name in parameter_names(state.architecture):
            steps[f"m/{name}"] = torch.zeros_like(state.weights[name])
            steps[f"v/{name}"] = torch.full_like(state.weights[name], tau**2)
        return steps

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        moved, kept = dict(weights), dict(steps)
        for name in parameter_names(view.state.architecture):
            before = view.state.weights[name]
            change = weights[name] - before
            m = beta1 * steps[f"m/{name}"] + (1 - beta1) * change
            v = second(steps[f"v/{name}"], change.square(), beta2)
            moved[name] = before + lr * m / (v.sqrt() + tau)
            kept[f"m/{name}"], kept[f"v/{name}"] = m, v
        return moved, kept, {}

    return ServerStep(init, apply)
