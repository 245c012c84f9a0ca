"""Slow, obvious references that methods are compared with, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from feddumap import run as api
from feddumap.core.messages import InputSpec, Tensors
from feddumap.core.rng import stream
from feddumap.models import network
from feddumap.training.samples import Samples, batches


def augmentation(run: api.Run) -> InputSpec | None:
    return run.state.architecture.input if run.config.data.augment else None


def sgd_oracle(run: api.Run, start: Tensors, device: int, number: int) -> Tensors:
    """Local training as anyone would write it, in double precision."""
    config = run.config
    indices = run.split.device(device)
    data = Samples.take(run.dataset.train_inputs, run.dataset.train_labels, indices)
    model = network(run.state.architecture, start).double()
    rng = stream(config.run.seed, "batches", number, device)
    lr = config.train.lr * config.train.lr_decay**number
    for inputs, labels in batches(
        data, config.train.epochs, config.train.batch, rng, augment=augmentation(run)
    ):
        loss = F.cross_entropy(model(inputs.double()), labels)
        for parameter, grad in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.data -= lr * grad
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def samples(count: int) -> Samples:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return Samples(images, torch.randint(0, 10, (count,), generator=generator))


def taken(run: api.Run, indices: np.ndarray) -> Samples:
    return Samples.take(run.dataset.train_inputs, run.dataset.train_labels, indices)


Step = Callable[[str, torch.Tensor], torch.Tensor]


def walk(
    run: api.Run, start: Tensors, data: Samples, rng: np.random.Generator, number: int, step: Step
) -> Tensors:
    """E epochs in double precision, moving each parameter by −η times what `step` makes of its gradient."""
    config = run.config
    model = network(run.state.architecture, start).double()
    lr = config.train.lr * config.train.lr_decay**number
    named = dict(model.named_parameters())
    for inputs, labels in batches(
        data, config.train.epochs, config.train.batch, rng, augment=augmentation(run)
    ):
        grads = torch.autograd.grad(F.cross_entropy(model(inputs.double()), labels), list(named.values()))
        for (name, parameter), grad in zip(named.items(), grads, strict=True):
            parameter.data -= lr * step(name, grad)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def averaged(sizes: list[int], models: list[Tensors]) -> Tensors:
    names = models[0]
    return {n: sum(s * m[n] for s, m in zip(sizes, models, strict=True)) / sum(sizes) for n in names}
