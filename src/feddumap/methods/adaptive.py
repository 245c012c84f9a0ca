"""FedAP's reshaping step: nodes' rates, the global rate, layer rates, ranks, removal."""

from __future__ import annotations

from collections.abc import Sequence

from feddumap.core.algorithm import Cohort, Context, Metrics, Reshape
from feddumap.core.messages import Broadcast, Question, ServerState
from feddumap.core.sampling import select
from feddumap.models.cost import macs, parameter_names, parameters
from feddumap.pruning.dependency_graph import Layer, prunable
from feddumap.pruning.global_rate import GlobalRate
from feddumap.pruning.ranks import feature_ranks
from feddumap.pruning.rates import dropped, layer_rates, threshold
from feddumap.pruning.removal import plan
from feddumap.training.model import make


def layer_adaptive(rate: GlobalRate, coupled: bool) -> Reshape:
    """FedAP, once: returns the state with the filters removed, and the story of it."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        # 1. a rate from each node, and p* = Σ ω_k p_k
        total, nodes = rate(state, context, cohort)
        # 2. the threshold V, and a rate for each layer
        layers = prunable(state.architecture).choose(coupled=coupled)
        limit = threshold(state.weights, parameter_names(state.architecture), total)
        rates = layer_rates(state.weights, {layer.leader: layer.members for layer in layers}, limit)
        # 3. the filters of lowest rank go
        ranks = ask_ranks(state, context, cohort, layers)
        drop = {name: dropped(rates[name], ranks[name]) for name in rates}
        cut = plan(state.architecture, drop).state(state)
        metrics = {
            "rate": total,
            "threshold": limit,
            "nodes": nodes,
            **changes(state, cut, rates, drop),
        }
        return cut, {"pruning": metrics}

    return reshape


def changes(
    before: ServerState, after: ServerState, rates: dict[str, float], drop: dict[str, list[int]]
) -> Metrics:
    """What a cut did, layer by layer and in all."""
    old, new = before.architecture, after.architecture
    return {
        "layers": {
            name: {
                "rate": rates[name],
                "filters": old.widths[name],
                "kept": new.widths[name],
                "removed": channels,
            }
            for name, channels in drop.items()
        },
        "parameters": {"before": parameters(old), "after": parameters(new)},
        "macs": {"before": macs(old), "after": macs(new)},
    }


def ask_ranks(
    state: ServerState, context: Context, cohort: Cohort, layers: Sequence[Layer]
) -> dict[str, list[float]]:
    """Feature-map ranks on the server's images or, if it has none, on one device that sends them."""
    if len(context.server):
        model = make(state.architecture, state.weights, context.config.train.kernels)
        return feature_ranks(
            model, layers, context.server, lambda done, total: context.progress("feature ranks", done, total)
        )
    device = select(context.config, state.round)[0]
    asked = Question("ranks", {"layers": [layer.leader for layer in layers]})
    message = Broadcast(state.round, state.architecture, state.weights, 0.0, mask=state.mask)
    (answer,) = cohort.survey(asked, message, [device])
    return {name: tensor.tolist() for name, tensor in answer.tensors.items()}
