"""A FedDU round by hand, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from feddumap import run as api
from feddumap.core.algorithm import Census, Context, Receipt, RoundView
from feddumap.core.messages import Tensors
from feddumap.core.rng import stream
from feddumap.core.sampling import select
from feddumap.models import network
from feddumap.training.samples import Samples, batches, to_input
from tests.support.oracles import augmentation


@dataclass(frozen=True)
class Path64:
    """Where a training in double precision ended, the mean of the gradients it met, and its steps."""

    weights: Tensors
    mean_gradient: Tensors
    steps: int


def descend(
    run: api.Run, start: Tensors, data: Samples, rng: np.random.Generator, lr: float, beta: float = 0.0
) -> Path64:
    """m ← β m + (1 − β) g and w ← w − η m from m = 0, written for one parameter after the other."""
    train = run.config.train
    model = network(run.state.architecture, start).double()
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    moving = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    steps = 0
    for inputs, labels in batches(data, train.epochs, train.batch, rng, augment=augmentation(run)):
        loss = F.cross_entropy(model(inputs.double()), labels)
        grads = torch.autograd.grad(loss, list(named.values()))
        for (name, parameter), grad in zip(named.items(), grads, strict=True):
            total[name] += grad
            moving[name] = beta * moving[name] + (1 - beta) * grad
            parameter.data -= lr * moving[name]
        steps += 1
    weights = {name: parameter.detach() for name, parameter in named.items()}
    return Path64(weights, {name: value / steps for name, value in total.items()}, steps)


def taken(run: api.Run, indices: np.ndarray) -> Samples:
    return Samples.take(run.dataset.train_inputs, run.dataset.train_labels, indices)


def measure(run: api.Run, weights: Tensors, data: Samples) -> tuple[float, float]:
    """Accuracy and mean loss in double precision, eval mode, images as they are."""
    model = network(run.state.architecture, weights).double().eval()
    with torch.no_grad():
        outputs = model(to_input(data.inputs).double())
    accuracy = (outputs.argmax(1) == data.targets).double().mean().item()
    return accuracy, F.cross_entropy(outputs, data.targets).item()


def js(p: Sequence[float], q: Sequence[float]) -> float:
    """Jensen-Shannon divergence in bits, from its definition."""
    p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    kl = [sum(x * math.log2(x / m) for x, m in zip(r, middle, strict=True) if x) for r in (p, q)]
    return sum(kl) / 2


def feddu_round(
    run: api.Run, weights: Tensors, number: int, decay: float, beta: float = 0.0
) -> tuple[Tensors, dict[str, float]]:
    """A round in double precision that builds ḡ0: w = w½ − τ_eff η ḡ0, with τ_eff = α τ."""
    config = run.config
    lr = config.train.lr * config.train.lr_decay**number
    chosen = select(config, number)
    trained = [
        descend(
            run, weights, taken(run, run.split.device(k)), stream(config.run.seed, "batches", number, k), lr,
            beta,
        )
        for k in chosen
    ]  # fmt: skip
    sizes = [len(run.split.device(k)) for k in chosen]
    half = {
        name: sum(n * path.weights[name] for n, path in zip(sizes, trained, strict=True)) / sum(sizes)
        for name in weights
    }
    server = taken(run, run.split.server)
    counts = run.split.counts(run.dataset.train_labels, 10)
    own = [int((server.targets == y).sum()) for y in range(10)]
    accuracy, _ = measure(run, half, server)
    devices = js(counts[chosen].sum(axis=0).tolist(), counts.sum(axis=0).tolist())
    degree = js(own, counts.sum(axis=0).tolist())
    n0, n = len(server), sum(sizes)
    alpha = (1 - accuracy) * n0 * devices / (n0 * devices + n * degree) * decay**number
    path = descend(run, half, server, stream(config.run.seed, "server-batches", number), lr)
    tau = config.train.epochs * math.ceil(n0 / config.train.batch)
    assert path.steps == tau
    facts = {"alpha": alpha, "tau_eff": alpha * tau, "server_accuracy": accuracy, "degree_devices": devices}
    moved = {name: half[name] - alpha * tau * lr * path.mean_gradient[name] for name in weights}
    return moved, {**facts, "degree_server": degree}


def assert_near(got: Tensors, expected: Tensors, rtol: float = 1e-4, atol: float = 2e-6) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=rtol, atol=atol, msg=name)


def view_of(run: api.Run, number: int = 0, lr: float = 0.05, server: Samples | None = None) -> RoundView:
    """What the server would see of round `number` if devices 0, 1 and 2 had trained."""
    counts = run.split.counts(run.dataset.train_labels, 10)
    server = taken(run, run.split.server) if server is None else server
    context = Context(run.config, server, Census(run.split.sizes, counts), run._clock)
    receipts = [Receipt(k, int(run.split.sizes[k]), 7) for k in range(3)]
    return RoundView(context, replace(run.state, round=number), lr, receipts)
