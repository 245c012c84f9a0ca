"""FedOpt (Reddi et al., 2021): an adaptive optimiser on the server, whose gradient is the mean update.

Δ = w½ − w,  m ← β₁ m + (1 − β₁) Δ,  w ← w + η m / (√v + τ)

FedAdagrad:  v ← v + Δ²
FedAdam:     v ← β₂ v + (1 − β₂) Δ²
FedYogi:     v ← v − (1 − β₂) Δ² sign(v − Δ²)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from feddumap.core.algorithm import Algorithm, Metrics, RoundView, ServerStep
from feddumap.core.messages import ServerState, Tensors
from feddumap.methods.fedavg import fedavg
from feddumap.methods.registry import Settings, method
from feddumap.methods.settings import Beta
from feddumap.models.cost import parameter_names


class FedOpt(Settings):
    server_lr: Annotated[float, Field(gt=0, allow_inf_nan=False, description="η of the server")] = 0.01
    beta1: Annotated[Beta, Field(description="β₁, of the mean update")] = 0.9
    beta2: Annotated[Beta, Field(description="β₂, of its square; fedadagrad has no use for it")] = 0.99
    tau: Annotated[float, Field(gt=0, allow_inf_nan=False, description="τ, added to √v")] = 0.001


SecondMoment = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""The next v, from v, Δ² and β₂."""


def adagrad(v: torch.Tensor, square: torch.Tensor, _: float) -> torch.Tensor:
    """v ← v + Δ²."""
    return v + square


def adam(v: torch.Tensor, square: torch.Tensor, beta: float) -> torch.Tensor:
    """v ← β₂ v + (1 − β₂) Δ²."""
    return beta * v + (1 - beta) * square


def yogi(v: torch.Tensor, square: torch.Tensor, beta: float) -> torch.Tensor:
    """v ← v − (1 − β₂) Δ² sign(v − Δ²)."""
    return v - (1 - beta) * square * torch.sign(v - square)


def fedopt(second_moment: SecondMoment, lr: float, beta1: float, beta2: float, tau: float) -> ServerStep:
    """Δ = w½ − w, m ← β₁ m + (1 − β₁) Δ, v by `second_moment`, w ← w + η m / (√v + τ).

    As in the paper's Algorithm 2, m starts at 0 and v at τ², and there is no bias correction. Batch norm's
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
            v = second_moment(steps[f"v/{name}"], change.square(), beta2)
            moved[name] = before + lr * m / (v.sqrt() + tau)
            kept[f"m/{name}"], kept[f"v/{name}"] = m, v
        return moved, kept, {}

    return ServerStep(init, apply)


def optimised(second_moment: SecondMoment, keys: FedOpt) -> Algorithm:
    """FedAvg with an adaptive optimiser on the server."""
    server = fedopt(second_moment, keys.server_lr, keys.beta1, keys.beta2, keys.tau)
    return replace(fedavg(), server=server)


@method("fedadagrad")
def fedadagrad(settings: FedOpt) -> Algorithm:
    """Adagrad on the server (Reddi et al.)."""
    return optimised(adagrad, settings)


@method("fedadam")
def fedadam(settings: FedOpt) -> Algorithm:
    """Adam on the server (Reddi et al.)."""
    return optimised(adam, settings)


@method("fedyogi")
def fedyogi(settings: FedOpt) -> Algorithm:
    """Yogi on the server (Reddi et al.)."""
    return optimised(yogi, settings)
