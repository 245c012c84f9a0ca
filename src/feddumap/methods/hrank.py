"""HRank (Lin et al., 2020): once, every convolution loses the same share of its filters, lowest rank first.

the ⌊p d_l⌋ filters of layer l whose feature maps have the lowest mean rank are removed
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from feddumap.core.algorithm import Algorithm, Cohort, Context, Metrics, Reshape, at_round
from feddumap.core.messages import ServerState
from feddumap.methods.fedap import ask_ranks, changes, check_prunable
from feddumap.methods.feddu import DynamicUpdate
from feddumap.methods.feddum import DeviceMomentum, ServerMomentum, pruned_method
from feddumap.methods.registry import recipe
from feddumap.methods.settings import Base, Coupled, Rate
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.rates import lowest_ranked
from feddumap.pruning.removal import plan


class Uniform(Coupled):
    prune_round: Annotated[int, Field(ge=0, description="rounds that have finished when it prunes")] = 30
    prune_rate: Annotated[Rate, Field(description="share of the filters removed from every convolution")] = (
        0.4
    )


def uniform(rate: float, coupled: bool) -> Reshape:
    """Remove ⌊rate · d_l⌋ filters of every layer that can lose some."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        layers = prunable(state.architecture).choose(coupled=coupled)
        ranks = ask_ranks(state, context, cohort, layers)
        drop = {layer.leader: lowest_ranked(rate, ranks[layer.leader]) for layer in layers}
        cut = plan(state.architecture, drop).state(state)
        rates = dict.fromkeys(drop, rate)
        return cut, {"pruning": {"rate": rate, "threshold": None, **changes(state, cut, rates, drop)}}

    return reshape


@recipe("hrank")
def hrank(
    base: Base, update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, settings: Uniform
) -> Algorithm:
    """One pruning at the same rate for every convolution, filters of lowest rank first (Lin et al.)."""
    return replace(
        pruned_method(base, update, server, device),
        reshape=at_round(settings.prune_round, uniform(settings.prune_rate, settings.coupled)),
        check=check_prunable(settings.coupled),
    )
