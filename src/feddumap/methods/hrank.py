"""HRank (Lin et al., 2020): once, every convolution loses the same share of its filters, lowest rank first.

the ⌊p d_l⌋ filters of layer l whose feature maps have the lowest mean rank are removed; units without maps
are ranked by mean activation
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from feddumap.core.algorithm import Algorithm, Cohort, Context, Metrics, Reshape, at_round
from feddumap.core.messages import ServerState
from feddumap.methods.fedap import ask_ranks, check_prunable, chosen_layers, pruning_never_reached, remove
from feddumap.methods.feddu import DynamicUpdate
from feddumap.methods.feddum import DeviceMomentum, ServerMomentum, pruned_method
from feddumap.methods.idle import all_of
from feddumap.methods.registry import method
from feddumap.methods.settings import Base, Cuts, Rate


class Uniform(Cuts):
    prune_round: Annotated[int, Field(ge=0, description="rounds that have finished when it prunes")] = 30
    prune_rate: Annotated[Rate, Field(description="share of the units removed from every layer")] = 0.4


def uniform(rate: float, cuts: Cuts) -> Reshape:
    """Remove ⌊rate · d_l⌋ units of every layer that can lose some."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        layers = chosen_layers(state.architecture, cuts)
        ranks = ask_ranks(state, context, cohort, layers)
        cut, told = remove(state, {layer.leader: rate for layer in layers}, ranks, cuts)
        return cut, {"pruning": {"rate": rate, "threshold": None, **told}}

    return reshape


@method("hrank")
def hrank(
    base: Base, update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, settings: Uniform
) -> Algorithm:
    """One pruning at the same rate for every convolution, filters of lowest rank first (Lin et al.)."""
    inner = pruned_method(base, update, server, device)
    return replace(
        inner,
        reshape=at_round(settings.prune_round, uniform(settings.prune_rate, settings)),
        check=check_prunable(settings),
        idle=all_of(inner.idle, pruning_never_reached(settings.prune_round)),
    )
