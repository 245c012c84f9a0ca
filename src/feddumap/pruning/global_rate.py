"""Nodes and their pruning rates: asking for them, and the one rate that they make together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from feddumap.core.algorithm import Cohort, Context
from feddumap.core.messages import Answer, Broadcast, Question, ServerState
from feddumap.core.sampling import select
from feddumap.data.label_mix import divergence
from feddumap.errors import FeddumapError
from feddumap.pruning.rates import node_rate, node_weights
from feddumap.training.model import make

SERVER = -1
"""The server's place in a list of nodes."""

GlobalRate = Callable[[ServerState, Context, Cohort], tuple[float, list[dict[str, Any]]]]
"""Finds p*; and tells of the nodes it was found from."""


@dataclass(frozen=True)
class Node:
    """A node and what it says of its curvature."""

    device: int
    samples: int
    degree: float
    rate: dict[str, Any]


def fixed(rate: float) -> GlobalRate:
    """A given p*: nobody is asked."""
    return lambda state, context, cohort: (rate, [])


def from_nodes(
    mode: Literal["density", "gap"], who: Literal["all", "selected", "server"], max_rate: float | None
) -> GlobalRate:
    """p* = Σ ω_k p_k, with a rate p_k from each node."""
    question = Question("rate", {"mode": mode, "max_rate": max_rate}, partial=True)

    def rate(state: ServerState, context: Context, cohort: Cohort) -> tuple[float, list[dict[str, Any]]]:
        nodes = survey_rates(state, context, cohort, question, who)
        weights = node_weights([node.samples for node in nodes], [node.degree for node in nodes])
        told = [
            {"device": node.device, "samples": node.samples, "degree": node.degree, "weight": float(weight)}
            | node.rate
            for weight, node in zip(weights, nodes, strict=True)
        ]
        return float(sum(weight * node.rate["p"] for weight, node in zip(weights, nodes, strict=True))), told

    return rate


def survey_rates(
    state: ServerState, context: Context, cohort: Cohort, question: Question, who: str
) -> list[Node]:
    """p_k of the server and of the devices asked."""
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
            make(state.architecture, state.weights, config.train.kernels), state.architecture, context.server,
            question, config.run.seed, ("server", state.round),
        )  # fmt: skip
        nodes.append(Node(SERVER, len(context.server), degree_of(SERVER, state, context), own.to_json()))
    message = Broadcast(state.round, state.architecture, state.weights, 0.0, mask=state.mask)
    for answer in cohort.survey(question, message, devices):
        check_rate(answer)
        samples = int(context.census.samples[answer.device])
        degree = degree_of(answer.device, state, context)
        nodes.append(Node(answer.device, samples, degree, dict(answer.values)))
        context.progress("pruning rates", len(nodes), expected)
    return nodes


def degree_of(device: int, state: ServerState, context: Context) -> float:
    """D(P_k) of a node, by what devices told of their labels; where they told nothing (only the server's
    rate is asked for, and has all the weight) it is 0."""
    counts = context.census.labels
    if counts is None:
        return 0.0
    own = np.bincount(context.server.labels.numpy(), minlength=state.architecture.classes)
    return float(divergence(own if device == SERVER else counts[device], counts.sum(axis=0)))


def check_rate(answer: Answer) -> None:
    """A rate is a number from 0 to 1, whoever sends it."""
    p = answer.values.get("p")
    if not isinstance(p, float) or not 0 <= p <= 1:
        raise FeddumapError(
            f"device {answer.device} sent the pruning rate {p!r}: expected a number from 0 to 1"
        )
