"""The global pruning rate p*: fixed, or a weighted average of the rates of the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from feddumap.core.algorithm import Cohort, Context
from feddumap.core.messages import Answer, Broadcast, Question, ServerState
from feddumap.core.sampling import select
from feddumap.data.label_mix import divergence
from feddumap.errors import FeddumapError
from feddumap.pruning.rates import node_rate, node_weights
from feddumap.training.backends import make_model

SERVER = -1
"""The device number of the server in a list of nodes."""

GlobalRate = Callable[[ServerState, Context, Cohort], tuple[float, list[dict[str, Any]]]]
"""Computes p*, and a report of each node for the record."""


@dataclass(frozen=True)
class NodeReport:
    """The pruning rate of a node, and the inputs of its weight ω_k."""

    device: int
    samples: int
    degree: float
    rate: dict[str, Any]


def fixed_rate(rate: float) -> GlobalRate:
    """A given p*."""
    return lambda state, context, cohort: (rate, [])


def node_average(
    mode: Literal["density", "gap"], who: Literal["all", "selected", "server"], max_rate: float | None
) -> GlobalRate:
    """p* = Σ ω_k p_k over the rates p_k of the nodes."""
    question = Question("rate", {"mode": mode, "max_rate": max_rate}, partial=True)

    def rate(state: ServerState, context: Context, cohort: Cohort) -> tuple[float, list[dict[str, Any]]]:
        nodes = survey_rates(state, context, cohort, question, who)
        weights = node_weights([node.samples for node in nodes], [node.degree for node in nodes])
        reports = [
            {"device": node.device, "samples": node.samples, "degree": node.degree, "weight": float(weight)}
            | node.rate
            for weight, node in zip(weights, nodes, strict=True)
        ]
        return float(
            sum(weight * node.rate["p"] for weight, node in zip(weights, nodes, strict=True))
        ), reports

    return rate


def survey_rates(
    state: ServerState, context: Context, cohort: Cohort, question: Question, who: str
) -> list[NodeReport]:
    """The rates p_k of the server and of the devices that `who` names."""
    config = context.config
    devices: Sequence[int] = {
        "all": range(config.data.devices),
        "selected": select(config, state.round),
        "server": (),
    }[who]
    expected = len(devices) + bool(len(context.server))
    nodes = []
    if len(context.server):
        model = make_model(state.architecture, state.weights, config.train.kernels)
        stream_name = ("server", state.round)
        own = node_rate(
            model, state.architecture, context.server, question, config.run.seed, stream_name,
            partial(context.progress, "curvature on the server's data"),
        )  # fmt: skip
        degree = degree_of(SERVER, state, context)
        nodes.append(NodeReport(SERVER, len(context.server), degree, own.to_json()))
    context.progress("pruning rates", len(nodes), expected)
    message = Broadcast(state.round, state.architecture, state.weights, 0.0, mask=state.mask)
    for answer in cohort.survey(question, message, devices):
        check_rate(answer)
        samples = int(context.census.samples[answer.device])
        degree = degree_of(answer.device, state, context)
        nodes.append(NodeReport(answer.device, samples, degree, dict(answer.values)))
        context.progress("pruning rates", len(nodes), expected)
    if not nodes:  # p* would be 0, and nothing pruned
        raise FeddumapError(
            f"round {state.round}: no device told its pruning rate, and the server has no samples for one: "
            "resume when devices are there"
        )
    return nodes


def degree_of(device: int, state: ServerState, context: Context) -> float:
    """D(P_k) of a node by the label counts of the census; 0 without them, since the server is then the only
    node."""
    counts = context.census.labels
    if counts is None:
        return 0.0
    own = np.bincount(context.server.targets.numpy(), minlength=state.architecture.classes)
    return float(divergence(own if device == SERVER else counts[device], counts.sum(axis=0)))


def check_rate(answer: Answer) -> None:
    """Raise an error unless an answer has a rate from 0 to 1."""
    p = answer.values.get("p")
    if not isinstance(p, float) or not 0 <= p <= 1:
        raise FeddumapError(
            f"device {answer.device} sent the pruning rate {p!r}: expected a number from 0 to 1"
        )
