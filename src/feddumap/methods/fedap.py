"""FedAP: once, filters (or all hidden units) are removed at rates found from the curvature of the loss.

p* = Σ ω_k p_k, ω_k ∝ n_k / (D(P_k) + ε): the global rate, from a rate of each node
V = the ⌊R p*⌋-th smallest |v| of all R parameters; p_l = the share of layer l's weights below V
the ⌊p_l d_l⌋ filters of layer l whose feature maps have the lowest mean rank are removed; units without maps
are ranked by mean activation
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from feddumap.core.algorithm import Algorithm, Cohort, Context, Metrics, Reshape, at_round
from feddumap.core.messages import Architecture, Broadcast, Question, ServerState
from feddumap.core.sampling import select
from feddumap.methods.fedavg import fedavg
from feddumap.methods.feddu import DynamicUpdate, feddu
from feddumap.methods.idle import Idle, all_of, never_reached
from feddumap.methods.registry import method
from feddumap.methods.settings import Cuts, Rates
from feddumap.models import layer_widths
from feddumap.models.cost import macs, parameter_names, parameters
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.global_rate import GlobalRate, fixed_rate, node_average
from feddumap.pruning.ranks import unit_ranks
from feddumap.pruning.rates import layer_rates, lowest_ranked, threshold
from feddumap.pruning.removal import plan
from feddumap.pruning.structure import PrunableLayer
from feddumap.pruning.verification import check_cut


class Pruning(Rates, Cuts):
    pass


# server side; devices answer its questions (`rate`, `ranks`) and train as in the method that is pruned


def layer_adaptive(rate: GlobalRate, cuts: Cuts) -> Reshape:
    """Removes units at layer-adaptive rates; records rates, threshold and what was removed."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        # 1. a rate from each node, and p* = Σ ω_k p_k
        total, nodes = rate(state, context, cohort)
        # 2. the threshold V, and a rate for each layer
        layers = chosen_layers(state.architecture, cuts)
        limit, rates = adaptive_rates(state, layers, total)
        # 3. the units of lowest rank are removed
        ranks = ask_ranks(state, context, cohort, layers)
        cut, told = remove(state, rates, ranks, cuts)
        return cut, {"pruning": {"rate": total, "threshold": limit, "nodes": nodes, **told}}

    return reshape


def chosen_layers(architecture: Architecture, cuts: Cuts) -> tuple[PrunableLayer, ...]:
    """The layers that the settings let prune; an error if there are none."""
    return prunable(architecture, cuts.units).choose(coupled=cuts.coupled, keep=cuts.keep)


def adaptive_rates(
    state: ServerState, layers: Sequence[PrunableLayer], total: float
) -> tuple[float, dict[str, float]]:
    """V, and p_l of each layer."""
    limit = threshold(state.weights, parameter_names(state.architecture), total)
    return limit, layer_rates(state.weights, {layer.leader: layer.members for layer in layers}, limit)


def remove(
    state: ServerState, rates: Mapping[str, float], ranks: Mapping[str, Sequence[float]], cuts: Cuts
) -> tuple[ServerState, Metrics]:
    """Remove of each layer the share `rates` of its units, lowest rank first; tell what changed, and which
    layers cannot be cut. The cut is tried out before it is used."""
    drop = {name: lowest_ranked(rates[name], ranks[name]) for name in rates}
    cut = plan(state.architecture, drop)
    check_cut(state.architecture, cut)
    after = cut.state(state)
    old, new = layer_widths(state.architecture), layer_widths(after.architecture)
    layers = {
        name: {"rate": rates[name], "filters": old[name], "kept": new[name], "removed": units}
        for name, units in drop.items()
    }
    told = {"layers": layers, **costs(state.architecture, after.architecture)}
    refused = prunable(state.architecture, cuts.units).refused
    return after, {**told, "refused": refused} if refused else told


def costs(old: Architecture, new: Architecture) -> Metrics:
    """Parameters and multiply-adds before and after."""
    return {
        "parameters": {"before": parameters(old), "after": parameters(new)},
        "macs": {"before": macs(old), "after": macs(new)},
    }


def ask_ranks(
    state: ServerState, context: Context, cohort: Cohort, layers: Sequence[PrunableLayer]
) -> dict[str, list[float]]:
    """The ranks of units on the server's samples or, if it has none, on one device that sends them."""
    if len(context.server):
        kernels = context.config.train.kernels
        return unit_ranks(
            state.architecture, state.weights, kernels, layers, context.server,
            partial(context.progress, "feature ranks"),
        )  # fmt: skip
    device = context.census.present(select(context.config, state.round))[0]
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
        return replace(base, server_data=max(1, base.server_data))
    return replace(base, labels=keys.label_mix)


def check_prunable(cuts: Cuts) -> Callable[[Architecture], None]:
    """The `check` slot: refuses, before any training, a network with nothing to remove."""

    def check(architecture: Architecture) -> None:
        chosen_layers(architecture, cuts)

    return check


def pruning_never_reached(number: int) -> Idle:
    """The `idle` slot of a method that prunes after so many rounds."""
    return never_reached("prune_round", number)


def pruned(base: Algorithm, pruning: Pruning) -> Algorithm:
    """Any method, pruned once by FedAP."""
    return replace(
        with_rate_inputs(base, pruning),
        reshape=at_round(pruning.prune_round, layer_adaptive(global_rate(pruning), pruning)),
        check=check_prunable(pruning),
        idle=all_of(base.idle, pruning_never_reached(pruning.prune_round)),
    )


@method("fedap")
def fedap(pruning: Pruning) -> Algorithm:
    """FedAvg with adaptive pruning: once, filters are removed at rates found from the loss curvature."""
    return pruned(fedavg(), pruning)


@method("fedduap")
def fedduap(update: DynamicUpdate, pruning: Pruning) -> Algorithm:
    """Dynamic update and adaptive pruning."""
    return pruned(feddu(update), pruning)
