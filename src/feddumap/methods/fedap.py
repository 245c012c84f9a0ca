"""FedAP: once, filters are removed at layer-adaptive rates found from the curvature of the loss.

p* = Σ ω_k p_k, ω_k ∝ n_k / (D(P_k) + ε): the global rate, from a rate of each node
V = the ⌊R p*⌋-th smallest |v| of all R parameters; p_l = the share of layer l's weights below V
the ⌊p_l d_l⌋ filters of layer l whose feature maps have the lowest mean rank are removed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from feddumap.core.algorithm import Algorithm, Cohort, Context, Metrics, Reshape, at_round
from feddumap.core.messages import Architecture, Broadcast, Question, ServerState
from feddumap.core.sampling import select
from feddumap.methods.fedavg import fedavg
from feddumap.methods.feddu import DynamicUpdate, feddu
from feddumap.methods.registry import recipe
from feddumap.methods.settings import Coupled, Rates
from feddumap.models.cost import macs, parameter_names, parameters
from feddumap.pruning.dependency_graph import PrunableLayer, prunable
from feddumap.pruning.global_rate import GlobalRate, fixed_rate, node_average
from feddumap.pruning.ranks import feature_ranks
from feddumap.pruning.rates import layer_rates, lowest_ranked, threshold
from feddumap.pruning.removal import dry_run, plan
from feddumap.training.backends import make_model


class Pruning(Rates, Coupled):
    pass


# server side; devices answer its questions (`rate`, `ranks`) and train as in the method that is pruned


def layer_adaptive(rate: GlobalRate, coupled: bool) -> Reshape:
    """Removes filters at layer-adaptive rates; records rates, threshold and what was removed."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        # 1. a rate from each node, and p* = Σ ω_k p_k
        total, nodes = rate(state, context, cohort)
        # 2. the threshold V, and a rate for each layer
        layers = prunable(state.architecture).choose(coupled=coupled)
        limit = threshold(state.weights, parameter_names(state.architecture), total)
        rates = layer_rates(state.weights, {layer.leader: layer.members for layer in layers}, limit)
        # 3. the filters of lowest rank are removed
        ranks = ask_ranks(state, context, cohort, layers)
        drop = {name: lowest_ranked(rates[name], ranks[name]) for name in rates}
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
    """What a removal changed, by layer and in all."""
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
    state: ServerState, context: Context, cohort: Cohort, layers: Sequence[PrunableLayer]
) -> dict[str, list[float]]:
    """Feature-map ranks on the server's images or, if it has none, on one device that sends them."""
    if len(context.server):
        model = make_model(state.architecture, state.weights, context.config.train.kernels)
        return feature_ranks(
            model, layers, context.server, lambda done, total: context.progress("feature ranks", done, total)
        )
    device = select(context.config, state.round)[0]
    question = Question("ranks", {"layers": [layer.leader for layer in layers]})
    message = Broadcast(state.round, state.architecture, state.weights, 0.0, mask=state.mask)
    (answer,) = cohort.survey(question, message, [device])
    return {name: tensor.tolist() for name, tensor in answer.tensors.items()}


def global_rate(keys: Rates) -> GlobalRate:
    """How p* is found, by `method.rate`."""
    if keys.rate == "fixed":
        assert keys.fixed_rate is not None
        return fixed_rate(keys.fixed_rate)
    return node_average(keys.rate, keys.rate_nodes, keys.max_rate)


def with_rate_inputs(base: Algorithm, keys: Rates) -> Algorithm:
    """Any method, with what finding p* needs: the devices' label mixes, or images on the server."""
    if keys.rate == "fixed":
        return base
    if keys.rate_nodes == "server":
        return replace(base, server_data=True)
    return replace(base, labels=keys.label_mix)


def check_prunable(coupled: bool) -> Callable[[Architecture], None]:
    """The `check` slot: refuses, before any training, a network whose filters cannot be removed."""
    return lambda shape: dry_run(shape, prunable(shape).choose(coupled=coupled))


def pruned(base: Algorithm, pruning: Pruning) -> Algorithm:
    """Any method, pruned once by FedAP."""
    return replace(
        with_rate_inputs(base, pruning),
        reshape=at_round(pruning.prune_round, layer_adaptive(global_rate(pruning), pruning.coupled)),
        check=check_prunable(pruning.coupled),
    )


@recipe("fedap")
def fedap(pruning: Pruning) -> Algorithm:
    """FedAvg with adaptive pruning: once, filters are removed at rates found from the loss curvature."""
    return pruned(fedavg(), pruning)


@recipe("fedduap")
def fedduap(update: DynamicUpdate, pruning: Pruning) -> Algorithm:
    """Dynamic update and adaptive pruning."""
    return pruned(feddu(update), pruning)
