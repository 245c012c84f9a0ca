"""What a device answers when it is asked without training. Nothing else about its data leaves it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from feddumap.device.task import Task
from feddumap.errors import unknown
from feddumap.pruning.graph import prunable
from feddumap.pruning.prunefl import first_mask
from feddumap.pruning.ranks import feature_ranks
from feddumap.pruning.rates import node_rate
from feddumap.training.model import make
from feddumap.types import Answer, Question


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


def rate(question: Question, task: Task) -> Answer:
    """FedAP's pruning rate of this device at the global model, with what it was read from."""
    config, message = task.config, task.broadcast
    model = make(
        message.architecture, message.weights, config.train.kernels
    )  # on the CPU, wherever training runs
    found = node_rate(
        model, message.architecture, task.holdings.samples(task.device), question,
        config.run.seed, ("device", message.round, task.device),
    )  # fmt: skip
    return Answer(task.device, found.to_json())


def ranks(question: Question, task: Task) -> Answer:
    """Feature-map ranks on this device's images, for a server that has none."""
    wanted = set(question.settings["layers"])
    layers = [layer for layer in prunable(task.broadcast.architecture).layers if layer.leader in wanted]
    samples = task.holdings.samples(task.device)
    model = make(task.broadcast.architecture, task.broadcast.weights, task.config.train.kernels)
    found = feature_ranks(model, layers, samples, lambda *_: None)
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}
    return Answer(task.device, tensors=tensors)


REPORTS: Mapping[str, Callable[[Question, Task], Answer]] = {
    "census": census,
    "rate": rate,
    "ranks": ranks,
    "first-mask": first_mask,
}


def answer(question: Question, task: Task) -> Answer:
    """Look the question up and answer it."""
    if question.name not in REPORTS:
        raise unknown("question", question.name, REPORTS)
    return REPORTS[question.name](question, task)
