"""FedDUM: FedDU with momentum on devices and server. Nothing more is sent than with FedAvg.

    device:  m' ← β' m' + (1 − β') g, w' ← w' − η m', from m' = 0 in each round
    server:  g = w^(t−1) − (FedDU's result), m ← β m + (1 − β) g, w^t = w^(t−1) − m

FedDU-DM has the device side alone, FedDU-SM the server side alone; `device-momentum` and `server-momentum`
are the same on top of FedAvg.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from feddumap.core.algorithm import Algorithm, Local, Metrics, RoundView, ServerStep, chain
from feddumap.core.messages import ServerState, Tensors
from feddumap.methods.fedavg import fedavg, train_with
from feddumap.methods.feddu import DynamicUpdate, feddu
from feddumap.methods.registry import Settings, method
from feddumap.methods.server_state import zeros
from feddumap.methods.settings import Base, Beta
from feddumap.models.cost import parameter_names
from feddumap.training.optimizers import momentum


class DeviceMomentum(Settings):
    device_momentum: Annotated[Beta, Field(description="β', on devices, restarted in each round")] = 0.9


class ServerMomentum(Settings):
    server_momentum: Annotated[Beta, Field(description="β, on the server's pseudo-gradient")] = 0.5
    momentum_start: Annotated[
        Literal["first", "zero"], Field(description="the server's momentum begins as the first g, or as 0")
    ] = "first"


# device side


def restarted_momentum(beta: float) -> Local:
    """SGD with momentum that starts at zero in each round, so that none is ever sent."""
    return train_with(momentum(beta))


# server side


def server_momentum(beta: float, start: Literal["first", "zero"]) -> ServerStep:
    """g = w_before − w_after, m ← β m + (1 − β) g, w ← w_before − m.

    w_after is the result of the steps before this one. m starts as the first g, or as zero. Batch norm's
    statistics have no momentum. With β = 0 the result is w_after itself, without the rounding of
    w_before − (w_before − w_after).
    """

    def init(state: ServerState) -> Tensors:
        return {} if start == "first" else zeros(state, "momentum/")

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        kept: Tensors = {}
        moved = dict(weights)
        for name in parameter_names(view.state.architecture):
            before = view.state.weights[name]
            gradient = before - weights[name]
            known = steps.get(f"momentum/{name}")
            m = gradient if known is None else beta * known + (1 - beta) * gradient
            kept[f"momentum/{name}"] = m
            if beta > 0:
                moved[name] = before - m
        return moved, kept, {}

    return ServerStep(init, apply)


def with_server_momentum(base: Algorithm, settings: ServerMomentum) -> Algorithm:
    """Any method, with momentum on the result of its server step."""
    step = server_momentum(settings.server_momentum, settings.momentum_start)
    return replace(base, server=chain(base.server, step))


def with_device_momentum(base: Algorithm, settings: DeviceMomentum) -> Algorithm:
    """Any method whose devices train as in FedAvg, with momentum on them instead."""
    return replace(base, local=restarted_momentum(settings.device_momentum))


@method("feddu-sm")
def feddu_sm(update: DynamicUpdate, server: ServerMomentum) -> Algorithm:
    """FedDU with momentum on the server only."""
    return with_server_momentum(feddu(update), server)


@method("feddu-dm")
def feddu_dm(update: DynamicUpdate, device: DeviceMomentum) -> Algorithm:
    """FedDU with restarted momentum on the devices only."""
    return with_device_momentum(feddu(update), device)


@method("feddum")
def feddum(update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum) -> Algorithm:
    """FedDU with momentum on devices and server, none of which is sent."""
    return with_server_momentum(feddu_dm(update, device), server)


@method("server-momentum")
def only_server_momentum(server: ServerMomentum) -> Algorithm:
    """FedAvg with momentum on the server."""
    return with_server_momentum(fedavg(), server)


@method("device-momentum")
def only_device_momentum(device: DeviceMomentum) -> Algorithm:
    """FedAvg with momentum on the devices, restarted in each round."""
    return with_device_momentum(fedavg(), device)


def pruned_method(
    base: Base, update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum
) -> Algorithm:
    """The method that HRank, IMC and PruneFL prune, by `method.base`."""
    return {"fedavg": fedavg(), "feddu": feddu(update), "feddum": feddum(update, server, device)}[base.base]
