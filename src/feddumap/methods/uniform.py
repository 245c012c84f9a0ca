"""HRank: the same pruning rate for every convolution, filters of lowest feature-map rank first."""

from feddumap.core.algorithm import Cohort, Context, Metrics, Reshape
from feddumap.core.messages import ServerState
from feddumap.methods.adaptive import ask_ranks, changes
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.rates import dropped
from feddumap.pruning.removal import plan


def uniform(rate: float, coupled: bool) -> Reshape:
    """Remove ⌊rate · d_l⌋ filters of every layer that can lose some."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        layers = prunable(state.architecture).choose(coupled=coupled)
        ranks = ask_ranks(state, context, cohort, layers)
        drop = {layer.leader: dropped(rate, ranks[layer.leader]) for layer in layers}
        cut = plan(state.architecture, drop).state(state)
        rates = dict.fromkeys(drop, rate)
        return cut, {"pruning": {"rate": rate, "threshold": None, **changes(state, cut, rates, drop)}}

    return reshape
