"""IMC (Zhang et al.): once, the smallest weights of the whole network are masked, at FedAP's global rate p*.

the ⌊R p*⌋ smallest |w| of all R weights and biases are zero from then on, neither trained nor sent
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from feddumap.core.algorithm import Algorithm, Cohort, Context, Metrics, Reshape, at_round
from feddumap.core.messages import ServerState
from feddumap.methods.fedap import global_rate, pruning_never_reached, with_rate_inputs
from feddumap.methods.feddu import DynamicUpdate
from feddumap.methods.feddum import DeviceMomentum, ServerMomentum, pruned_method
from feddumap.methods.idle import all_of
from feddumap.methods.registry import method
from feddumap.methods.settings import Base, Rates
from feddumap.pruning.global_rate import GlobalRate
from feddumap.pruning.masks import apply_mask, changes, magnitude_mask, maskable


class Magnitude(Rates):
    rate_nodes: Annotated[
        Literal["all", "selected", "server"], Field(description="nodes that find a rate")
    ] = "server"


def by_magnitude(rate: GlobalRate) -> Reshape:
    """Mask the smallest weights and biases of the whole network at one global rate."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        total, nodes = rate(state, context, cohort)
        mask = magnitude_mask(state.weights, maskable(state.architecture, biases=True), total)
        masked = apply_mask(state, mask)
        return masked, {"pruning": {"rate": total, "threshold": None, "nodes": nodes, **changes(state, mask)}}

    return reshape


@method("imc")
def imc(
    base: Base, update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, settings: Magnitude
) -> Algorithm:
    """One mask over the smallest weights of the whole network, which are neither trained nor sent (Zhang)."""
    method = with_rate_inputs(pruned_method(base, update, server, device), settings)
    return replace(
        method,
        reshape=at_round(settings.prune_round, by_magnitude(global_rate(settings))),
        idle=all_of(method.idle, pruning_never_reached(settings.prune_round)),
    )
