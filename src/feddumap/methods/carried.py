"""Server state that devices share in: FedDA's momentum v, MimeLite's statistic s, SCAFFOLD's control c."""

from __future__ import annotations

import torch

from feddumap.core.algorithm import Metrics, RoundView, Send, ServerStep
from feddumap.core.messages import ServerState, Tensors
from feddumap.methods.feddu import ShareRule, Trainer, server_update, train_copy
from feddumap.models.cost import parameter_names
from feddumap.training.optimizers import carried_momentum
from feddumap.training.samples import Samples


def zeros(state: ServerState, prefix: str) -> Tensors:
    """A zero for every parameter."""
    names = parameter_names(state.architecture)
    return {f"{prefix}{name}": torch.zeros_like(state.weights[name]) for name in names}


def sending(prefix: str) -> Send:
    """Broadcasts carry the server's tensors under this prefix."""
    return lambda state: {name: t for name, t in state.steps.items() if name.startswith(prefix)}


def shared_average() -> ServerStep:
    """FedDA: v ← mean v_k. (w − η · mean P_k with P_k = (w − w_k)/η is the mean of the w_k, which it has.)"""

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        return weights, dict(view.extra), {}

    return ServerStep(lambda state: zeros(state, "v/"), apply)


def with_update(rule: ShareRule, beta: float, *, hold_out: bool) -> ServerStep:
    """FedDA on top of FedDU: the server's copy trains with momentum from v, and w and v go the share α."""
    update = server_update(rule, hold_out=hold_out, trainer=momentum_trainer(beta))
    return ServerStep(lambda state: {**zeros(state, "v/"), **update.init(state)}, update.apply)


def momentum_trainer(beta: float) -> Trainer:
    def train(weights: Tensors, samples: Samples, view: RoundView) -> tuple[Tensors, Tensors]:
        carried = {name.removeprefix("v/"): tensor for name, tensor in view.extra.items()}
        trained, _ = train_copy(weights, samples, view, carried_momentum(beta, carried))
        return trained, {f"v/{name}": tensor.contiguous().cpu() for name, tensor in carried.items()}

    return train


def statistic(beta: float) -> ServerStep:
    """MimeLite: s ← β s + (1 − β) · the mean of the devices' full gradients at w."""

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        return weights, {name: beta * steps[name] + (1 - beta) * g for name, g in view.extra.items()}, {}

    return ServerStep(lambda state: zeros(state, "s/"), apply)


def control() -> ServerStep:
    """SCAFFOLD: c ← c + (n_S / n) · the mean change of the devices' c_k, weighted by n_k as the models are.

    So c stays Σ n_k c_k / n over all devices. With equal n_k that is the original's |S|/N and plain means.
    """

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        heard = sum(receipt.samples for receipt in view.receipts)
        share = heard / int(view.context.census.samples.sum())
        return weights, {name: steps[name] + share * change for name, change in view.extra.items()}, {}

    return ServerStep(lambda state: zeros(state, "c/"), apply)
