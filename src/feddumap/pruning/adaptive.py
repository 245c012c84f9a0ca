"""FedAP's reshaping step: nodes' rates, the global rate, layer rates, ranks, removal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from feddumap.algorithm import Cohort, Context, Metrics
from feddumap.data.divergence import divergence
from feddumap.errors import FeddumapError
from feddumap.models import network
from feddumap.models.cost import macs, parameter_names, parameters
from feddumap.pruning.cut import plan
from feddumap.pruning.graph import Layer, prunable
from feddumap.pruning.ranks import feature_ranks
from feddumap.pruning.rates import dropped, layer_rates, node_rate, node_weights, threshold
from feddumap.selection import select
from feddumap.types import Answer, Broadcast, Question, ServerState

SERVER = -1
"""The server's place in a list of nodes."""


@dataclass(frozen=True)
class Node:
    """A node and what it says of its curvature."""

    device: int
    samples: int
    degree: float
    rate: dict[str, Any]


def layer_adaptive(
    rate: Literal["density", "gap", "fixed"],
    fixed_rate: float | None,
    rate_nodes: Literal["all", "selected", "server"],
    max_rate: float | None,
    coupled: bool,
) -> Callable[[ServerState, Context, Cohort], tuple[ServerState, Metrics]]:
    """FedAP, once: returns the state with the filters removed, and the story of it."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        # 1. a rate from each node, and p* = Σ ω_k p_k
        if rate == "fixed":
            nodes, weights = [], np.zeros(0)
            assert fixed_rate is not None
            total = fixed_rate
        else:
            asked = Question("rate", {"mode": rate, "max_rate": max_rate})
            nodes = survey_rates(state, context, cohort, asked, rate_nodes)
            weights = node_weights([node.samples for node in nodes], [node.degree for node in nodes])
            total = float(sum(w * node.rate["p"] for w, node in zip(weights, nodes, strict=True)))
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
            "nodes": [
                {"device": node.device, "samples": node.samples, "degree": node.degree, "weight": float(w)}
                | node.rate
                for w, node in zip(weights, nodes, strict=True)
            ],
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


def survey_rates(
    state: ServerState, context: Context, cohort: Cohort, question: Question, who: str
) -> list[Node]:
    """p_k of the server and of the devices asked."""
    assert context.census.labels is not None
    counts, everyone = context.census.labels, context.census.labels.sum(axis=0)
    config = context.config
    devices: Sequence[int] = {
        "all": range(config.data.devices),
        "selected": select(config, state.round),
        "server": (),
    }[who]
    expected = len(devices) + bool(len(context.server))
    nodes = []
    if len(context.server):
        context.progress("pruning rates", 0, expected)
        own = node_rate(
            network(state.architecture, state.weights), state.architecture, context.server,
            question, config.run.seed, ("server", state.round),
        )  # fmt: skip
        labels = np.bincount(context.server.labels.numpy(), minlength=state.architecture.classes)
        nodes.append(Node(SERVER, len(context.server), float(divergence(labels, everyone)), own.to_json()))
    message = Broadcast(state.round, state.architecture, state.weights, 0.0)
    for answer in cohort.survey(question, message, devices):
        check_rate(answer)
        degree = float(divergence(counts[answer.device], everyone))
        samples = int(context.census.samples[answer.device])
        nodes.append(Node(answer.device, samples, degree, dict(answer.values)))
        context.progress("pruning rates", len(nodes), expected)
    return nodes


def ask_ranks(
    state: ServerState, context: Context, cohort: Cohort, layers: Sequence[Layer]
) -> dict[str, list[float]]:
    """Feature-map ranks on the server's images or, if it has none, on one device that sends them."""
    if len(context.server):
        model = network(state.architecture, state.weights)
        return feature_ranks(
            model, layers, context.server, lambda done, total: context.progress("feature ranks", done, total)
        )
    device = select(context.config, state.round)[0]
    asked = Question("ranks", {"layers": [layer.leader for layer in layers]})
    message = Broadcast(state.round, state.architecture, state.weights, 0.0)
    (answer,) = cohort.survey(asked, message, [device])
    return {name: tensor.tolist() for name, tensor in answer.tensors.items()}


def check_rate(answer: Answer) -> None:
    """A rate is a number from 0 to 1, whoever sends it."""
    p = answer.values.get("p")
    if not isinstance(p, float) or not 0 <= p <= 1:
        raise FeddumapError(
            f"device {answer.device} sent the pruning rate {p!r}: expected a number from 0 to 1"
        )
