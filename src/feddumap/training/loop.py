"""The training loop of devices and server, for every method."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from feddumap.training.backends import as_model
from feddumap.training.model import Loss, Model
from feddumap.training.optimizers import UpdateRule
from feddumap.training.samples import Batch, Samples

Schedule = Callable[[int], float]
"""The learning rate as a function of the step, from 0."""


def fit(
    model: Model | nn.Module,
    data: Iterable[Batch],
    rule: UpdateRule,
    lr: float | Schedule,
    loss: Loss | None = None,
) -> int:
    """Train in place, one step per batch, with cross-entropy by default; returns the number of steps."""
    trained = as_model(model)
    steps = 0
    with trained.training():
        parameters, state = trained.parameters, rule.init(trained)
        for batch in data:
            grads = trained.gradients(batch, loss)
            with torch.no_grad():
                rule.step(parameters, grads, state, lr(steps) if callable(lr) else lr)
            steps += 1
    return steps


def full_gradient(
    model: Model | nn.Module, samples: Samples, shift: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """∇ of the mean loss over all samples, in eval mode without augmentation, summed over fixed chunks."""
    made = as_model(model)
    total = made.zeros()
    for grads in made.summed_gradients(samples, shift):
        torch._foreach_add_(total, grads)
    return {name: grad / len(samples) for name, grad in made.named(total).items()}
