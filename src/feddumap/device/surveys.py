"""Questions that devices answer without training. Nothing else about their data leaves them.

A question is one entry of `SURVEYS`: its name, the device's handler, and what an answer must look like, which
is checked before the server uses one that came over a network. A method may register questions of its own
with `survey`, in the module that defines it: every worker process and every node imports that module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from feddumap.core.messages import Answer, Broadcast, Question
from feddumap.core.tensors import Form, Forms
from feddumap.device.task import Task
from feddumap.errors import unknown
from feddumap.models import layer_widths
from feddumap.pruning.ranks import unit_ranks
from feddumap.pruning.rates import NodeRate, node_rate
from feddumap.pruning.structure import candidates
from feddumap.training.backends import make_model

MOST_SAMPLES = 2**40

Handler = Callable[[Question, Task], Answer]
Fault = Callable[[Question, Broadcast, Mapping[str, Any]], str | None]
"""What is wrong with the numbers of an answer, or None."""


@dataclass(frozen=True)
class Survey:
    """A question: how a device answers it, and the schema of the answer.

    `fault` tells what is wrong with an answer's numbers. `forms` gives the names, types and shapes that its
    tensors must have; where it is None they may be any, up to a few times the size of the model.
    """

    handler: Handler
    fault: Fault
    forms: Callable[[Question, Broadcast], Forms] | None


SURVEYS: dict[str, Survey] = {}


def no_tensors(question: Question, broadcast: Broadcast) -> Forms:
    """For answers that are numbers only."""
    return {}


def no_values(question: Question, broadcast: Broadcast, values: Mapping[str, Any]) -> str | None:
    """For answers that are tensors only."""
    return "has numbers, expected none" if values else None


def survey(
    name: str, *, fault: Fault, forms: Callable[[Question, Broadcast], Forms] | None = no_tensors
) -> Callable[[Handler], Handler]:
    """Register the decorated handler as the answer to the question `name`.

    >>> @survey("how-many", fault=lambda question, broadcast, values: None)
    ... def how_many(question, task):
    ...     return Answer(task.device, {"images": len(task.holdings.labels(task.device))})
    >>> SURVEYS.pop("how-many").handler is how_many
    True
    """

    def enter(handler: Handler) -> Handler:
        SURVEYS[name] = Survey(handler, fault, forms)
        return handler

    return enter


def answer(question: Question, task: Task) -> Answer:
    """A device's answer to a question."""
    if question.name not in SURVEYS:
        raise unknown("question", question.name, SURVEYS)
    return SURVEYS[question.name].handler(question, task)


def _census_fault(question: Question, broadcast: Broadcast, values: Mapping[str, Any]) -> str | None:
    labels, classes = question.settings.get("labels"), broadcast.architecture.classes
    told = {"counts": {"counts"}, "gradient": {"gradient"}}.get(str(labels), set())
    if values.keys() != {"samples"} | told:
        return f"tells {sorted(values)}, expected {sorted({'samples'} | told)}"
    samples = values["samples"]
    if type(samples) is not int or not 0 < samples < MOST_SAMPLES:
        return f"tells {str(samples)[:40]} samples"
    for key in told:
        numbers = values[key]
        if not isinstance(numbers, list) or len(numbers) != classes or not all(map(is_number, numbers)):
            return f"tells {key} that are not {classes} numbers"
        if key == "counts" and (min(numbers) < 0 or sum(numbers) != samples):
            return f"tells counts that do not add up to its {samples} samples"
        if key == "gradient" and (min(numbers) < -1 or max(numbers) > 1 / classes + 1e-9):
            return "tells a gradient that no labels have"
        if key == "gradient" and abs(sum(numbers)) > 1e-6:
            return "tells a gradient whose parts do not add up to 0"
    return None


@survey("census", fault=_census_fault)
def census(question: Question, task: Task) -> Answer:
    """The number of samples and, only if asked, the label mix: as `counts` or as a `gradient`."""
    labels = task.holdings.labels(task.device)
    classes = task.broadcast.architecture.classes
    values: dict[str, Any] = {"samples": len(labels)}
    match question.settings.get("labels"):
        case "counts":
            values["counts"] = np.bincount(labels, minlength=classes).tolist()
        case "gradient":
            values["gradient"] = output_bias_gradient(labels, classes).tolist()
    return Answer(task.device, values)


def output_bias_gradient(labels: np.ndarray, classes: int) -> torch.Tensor:
    """∂ℓ/∂b of the full batch, for a network whose output layer is zero.

    Every logit is then b = 0 whatever the image, so the rest of the network need not be run.
    """
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    targets = torch.from_numpy(np.asarray(labels))
    (gradient,) = torch.autograd.grad(F.cross_entropy(bias.expand(len(labels), classes), targets), bias)
    return gradient


def label_counts(values: Mapping[str, Any]) -> np.ndarray:
    """The server's reading of an answer: a uniform softmax has g_b = 1/C − P_k, so n_k P_k = n_k (1/C − g_b).

    >>> label_counts({"samples": 4, "gradient": output_bias_gradient(np.array([0, 2, 2, 2]), 3).tolist()})
    array([1., 0., 3.])
    """
    if "counts" in values:
        return np.asarray(values["counts"], dtype=np.float64)
    gradient = np.asarray(values["gradient"], dtype=np.float64)
    return np.asarray(np.round(values["samples"] * (1 / len(gradient) - gradient), 6) + 0.0)


def _rate_fault(question: Question, broadcast: Broadcast, values: Mapping[str, Any]) -> str | None:
    names = {field.name for field in fields(NodeRate)}
    if values.keys() != names:
        return f"tells {sorted(values)[:10]}, expected {sorted(names)}"
    if not all(value is None or isinstance(value, bool) or is_number(value) for value in values.values()):
        return "tells a pruning rate whose parts are not numbers"
    p = values["p"]
    if not isinstance(p, float) or not 0 <= p <= 1:
        return f"tells the pruning rate {str(p)[:40]}, expected a number from 0 to 1"
    return None


@survey("rate", fault=_rate_fault)
def rate(question: Question, task: Task) -> Answer:
    """FedAP's pruning rate of this device at the global model, with what it was read from."""
    config, message = task.config, task.broadcast
    model = make_model(
        message.architecture, message.weights, config.train.kernels
    )  # on the CPU, wherever training runs
    found = node_rate(
        model, message.architecture, task.holdings.samples(task.device), question,
        config.run.seed, ("device", message.round, task.device),
    )  # fmt: skip
    return Answer(task.device, found.to_json())


def _rank_forms(question: Question, broadcast: Broadcast) -> Forms:
    widths = layer_widths(broadcast.architecture)
    return {name: Form("float64", (widths[name],)) for name in question.settings["layers"]}


@survey("ranks", fault=no_values, forms=_rank_forms)
def ranks(question: Question, task: Task) -> Answer:
    """The ranks of units on this device's samples, for a server that has none."""
    wanted, message = question.settings["layers"], task.broadcast
    known = {layer.leader: layer for layer in candidates(message.architecture, "all").layers}
    if strangers := [name for name in wanted if name not in known]:
        raise unknown("layer", strangers[0], known)
    found = unit_ranks(
        message.architecture, message.weights, task.config.train.kernels, [known[name] for name in wanted],
        task.holdings.samples(task.device), lambda *_: None,
    )  # fmt: skip
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}
    return Answer(task.device, tensors=tensors)


def is_number(value: object) -> bool:
    """Whether a value of an answer is a finite number."""
    return type(value) is int or (type(value) is float and math.isfinite(value))
