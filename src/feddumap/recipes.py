"""Every named method, as a composition of slots. A recipe's parameters are groups of keys of `[method]`.

To add a method: write the function it needs in its slot, add a recipe here, and every invariant test runs
over it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from feddumap.algorithm import Algorithm, at_round, chain
from feddumap.config import Config
from feddumap.device.local import local_sgd, restarted_momentum
from feddumap.menu import RECIPES, Group, recipe, resolve, settings_of
from feddumap.pruning.adaptive import layer_adaptive
from feddumap.pruning.graph import prunable
from feddumap.server.dynamic_update import dynamic, server_update, static
from feddumap.server.momentum import server_momentum

Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=0, le=1)]


class LabelMix(Group):
    label_mix: Annotated[
        Literal["counts", "gradient"],
        Field(description="what a device tells of its labels: counts, or one gradient they follow from"),
    ] = "counts"


class DynamicUpdate(LabelMix):
    c: Annotated[float, Field(ge=0, allow_inf_nan=False, description="C, the scale of the server's part")] = (
        1.0
    )
    decay: Annotated[
        Annotated[float, Field(gt=0, le=1)] | Literal["held-out"],
        Field(description="factor on the server's part, each round; or chosen on held-out server images"),
    ] = 0.999
    accuracy_weight: Annotated[
        Literal["one_minus", "inverse"], Field(description="f'(acc): 1 − acc, or 1/(acc + ε)")
    ] = "one_minus"


class StaticUpdate(Group):
    effective_steps: Annotated[
        Annotated[int, Field(ge=1)] | Literal["full"], Field(description="τ_eff: 5, 10, 20 …, or full")
    ] = 10


class Momentum(Group):
    server_momentum: Annotated[Beta, Field(description="β, on the server's pseudo-gradient")] = 0.5
    device_momentum: Annotated[Beta, Field(description="β', on devices, restarted in each round")] = 0.9
    momentum_start: Annotated[
        Literal["first", "zero"], Field(description="the server's momentum begins as the first g, or as 0")
    ] = "first"


class Pruning(LabelMix):
    prune_round: Annotated[int, Field(ge=0, description="rounds that have finished when it prunes")] = 30
    rate: Annotated[
        Literal["density", "gap", "fixed"], Field(description="how a node finds its pruning rate")
    ] = "density"
    fixed_rate: Annotated[Rate | None, Field(description="p* where rate is fixed")] = None
    rate_nodes: Annotated[
        Literal["all", "selected", "server"], Field(description="nodes that find a rate")
    ] = "all"
    max_rate: Annotated[
        Rate | None, Field(description="largest rate of a node; default 0.6 with gap, none otherwise")
    ] = None
    coupled: Annotated[
        bool, Field(description="also prune convolutions that share channels through residual sums")
    ] = False

    @model_validator(mode="after")
    def _complete(self) -> Pruning:
        if self.rate == "fixed" and self.fixed_rate is None:
            raise ValueError("method.rate = 'fixed' needs method.fixed_rate, a number from 0 to 1")
        return self


@recipe("fedavg")
def fedavg() -> Algorithm:
    """Federated averaging: devices train with SGD, the server takes the weighted mean (McMahan et al.)."""
    return Algorithm(local=local_sgd())


@recipe("feddu")
def feddu(update: DynamicUpdate) -> Algorithm:
    """Dynamic update: the server also trains on its data and goes part of the way, adaptively."""
    rule = dynamic(update.c, update.decay, update.accuracy_weight)
    server = server_update(rule, hold_out=update.decay == "held-out")
    return replace(fedavg(), server=server, labels=update.label_mix, server_data=True)


@recipe("feddu-s")
def feddu_s(update: StaticUpdate) -> Algorithm:
    """FedDU with a fixed number of effective server steps."""
    return replace(fedavg(), server=server_update(static(update.effective_steps)), server_data=True)


@recipe("feddum")
def feddum(update: DynamicUpdate, momentum: Momentum) -> Algorithm:
    """FedDU with momentum on devices and server, none of which is sent."""
    base = feddu(update)
    smoothed = server_momentum(momentum.server_momentum, momentum.momentum_start)
    return replace(
        base, local=restarted_momentum(momentum.device_momentum), server=chain(base.server, smoothed)
    )


def pruned(base: Algorithm, pruning: Pruning) -> Algorithm:
    """Any method, pruned once by FedAP. Rates are weighted by label mixes, so devices tell them."""
    cut = layer_adaptive(
        pruning.rate, pruning.fixed_rate, pruning.rate_nodes, pruning.max_rate, pruning.coupled
    )
    return replace(
        base,
        reshape=at_round(pruning.prune_round, cut),
        labels=pruning.label_mix,
        server_data=base.server_data or (pruning.rate != "fixed" and pruning.rate_nodes == "server"),
        check=lambda shape: prunable(shape).choose(coupled=pruning.coupled),
    )


@recipe("fedap")
def fedap(pruning: Pruning) -> Algorithm:
    """FedAvg with adaptive pruning: once, filters are removed at rates found from the loss curvature."""
    return pruned(fedavg(), pruning)


@recipe("fedduap")
def fedduap(update: DynamicUpdate, pruning: Pruning) -> Algorithm:
    """Dynamic update and adaptive pruning."""
    return pruned(feddu(update), pruning)


@recipe("feddumap")
def feddumap(update: DynamicUpdate, momentum: Momentum, pruning: Pruning) -> Algorithm:
    """Dynamic update, momentum and adaptive pruning: the whole of the paper."""
    return pruned(feddum(update, momentum), pruning)


def compose(config: Config) -> Algorithm:
    """The algorithm a configuration names."""
    method = resolve(config.method)
    return RECIPES[method.name].build(*settings_of(method))
