"""Which filters FedAP removes, by other measures than feature ranks: a method for results/importances.toml.

All measures remove the same number of filters of every layer, so multiply-adds are equal.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

import feddumap
from feddumap.core.algorithm import Cohort, Context, Metrics
from feddumap.core.messages import ServerState
from feddumap.core.rng import stream
from feddumap.methods.fedap import adaptive_rates, ask_ranks, chosen_layers, remove
from feddumap.methods.settings import Cuts
from feddumap.models import network
from feddumap.pruning.structure import PrunableLayer
from feddumap.training.samples import to_input

SAMPLES = 500
Importance = Literal["rank", "norm", "taylor", "random"]


def gradients(state: ServerState, context: Context) -> dict[str, torch.Tensor]:
    """The gradient of the loss on some of the server's images, by the parameter's name."""
    samples = context.server[:SAMPLES]
    model = network(state.architecture, state.weights).eval()
    F.cross_entropy(model(to_input(samples.inputs)), samples.targets).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def importances(
    kind: Importance, layers: tuple[PrunableLayer, ...], state: ServerState, context: Context, cohort: Cohort
) -> dict[str, list[float]]:
    """A number for each filter of each layer: its maps' mean rank, its L1 norm, |Σ w ∂L/∂w|, or any."""
    if kind == "rank":
        return ask_ranks(state, context, cohort, layers)
    weights = {layer.leader: state.weights[f"{layer.leader}.weight"].flatten(1) for layer in layers}
    if kind == "norm":
        return {name: weight.abs().sum(1).tolist() for name, weight in weights.items()}
    if kind == "taylor":
        slopes = gradients(state, context)
        return {
            name: (weight * slopes[f"{name}.weight"].flatten(1)).sum(1).abs().tolist()
            for name, weight in weights.items()
        }
    rng = stream(context.config.run.seed, "random importance")
    return {name: rng.random(len(weight)).tolist() for name, weight in weights.items()}


def pruned(importance: Importance = "rank", rate: float = 0.5, prune_round: int = 30) -> feddumap.Algorithm:
    """FedAvg, pruned once at FedAP's layer rates for a given p*."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        layers = chosen_layers(state.architecture, Cuts())
        limit, rates = adaptive_rates(state, layers, rate)
        found = importances(importance, layers, state, context, cohort)
        cut, told = remove(state, rates, found, Cuts())
        return cut, {"pruning": {"rate": rate, "threshold": limit, **told}}

    def local(task, samples):  # type: ignore[no-untyped-def]
        return task.plan(task.model(), samples, feddumap.sgd())

    return feddumap.Algorithm(local=local, reshape=feddumap.at_round(prune_round, reshape))
