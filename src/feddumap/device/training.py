"""The training loop: the only one. Devices and the server train with it, whatever the method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from feddumap.data.augment import crop_and_flip, pad
from feddumap.device.quick import quick

Batch = tuple[torch.Tensor, torch.Tensor]
Group = list[torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Schedule = Callable[[int], float]
"""The learning rate of a step, counted from 0."""
Watch = Callable[[dict[str, torch.Tensor]], None]
"""Sees the gradients of a step, by parameter name."""


@dataclass(frozen=True)
class Samples:
    """Images as bytes [n, h, w, c] and their labels [n]."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __add__(self, other: Samples) -> Samples:
        return Samples(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels]))

    @property
    def nbytes(self) -> int:
        """What sending them takes: a byte a pixel value, and a byte for each label."""
        return self.images.nbytes + len(self.labels)

    @staticmethod
    def take(images: np.ndarray, labels: np.ndarray, indices: np.ndarray) -> Samples:
        """Copy the chosen images out of a (memory-mapped) data set."""
        return Samples(torch.from_numpy(images[indices]), torch.from_numpy(labels[indices].astype(np.int64)))

    def to(self, device: str) -> Samples:
        return Samples(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Rule:
    """How a gradient moves the parameters: `init` makes a rule's own state, `step` updates in place.

    A rule that treats every number by itself, with a state of tensors shaped like the parameters in turn, may
    be applied `together` to several networks.
    """

    init: Callable[[dict[str, nn.Parameter]], Group]
    step: Callable[[Group, Group, Group, float], None]
    together: bool = True


def sgd() -> Rule:
    """w ← w − η g."""

    def step(parameters: Group, grads: Group, _: Group, lr: float) -> None:
        torch._foreach_add_(parameters, grads, alpha=-lr)

    return Rule(init=lambda _: [], step=step)


def momentum(beta: float) -> Rule:
    """m ← β m + (1 − β) g, w ← w − η m, from m = 0. (torch.optim.SGD's dampening skips its first step.)"""

    def init(named: dict[str, nn.Parameter]) -> Group:
        return [torch.zeros_like(parameter) for parameter in named.values()]

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        torch._foreach_mul_(state, beta)
        torch._foreach_add_(state, grads, alpha=1 - beta)
        torch._foreach_add_(parameters, state, alpha=-lr)

    return Rule(init, step)


def carried_momentum(beta: float, carried: dict[str, torch.Tensor]) -> Rule:
    """The same from a given m, by parameter name. `carried` is updated in place and holds m afterwards."""

    def init(named: dict[str, nn.Parameter]) -> Group:
        for name, parameter in named.items():
            carried[name] = torch.empty_like(parameter).copy_(carried[name])
        return [carried[name] for name in named]

    return replace(momentum(beta), init=init)


def frozen_momentum(beta: float, state: dict[str, torch.Tensor]) -> Rule:
    """w ← w − η ((1 − β) g + β s) with the server's s, which stays as it is (MimeLite)."""

    def init(named: dict[str, nn.Parameter]) -> Group:
        return [torch.empty_like(parameter).copy_(state[name]) for name, parameter in named.items()]

    def step(parameters: Group, grads: Group, frozen: Group, lr: float) -> None:
        torch._foreach_add_(parameters, grads, alpha=-lr * (1 - beta))
        torch._foreach_add_(parameters, frozen, alpha=-lr * beta)

    return Rule(init, step)


def proximal(mu: float) -> Rule:
    """w ← w − η (g + μ (w − w⁰)): FedProx, SGD on ℓ(w) + μ/2 ‖w − w⁰‖² with w⁰ the model received."""

    def init(named: dict[str, nn.Parameter]) -> Group:
        return [parameter.detach().clone() for parameter in named.values()]

    def step(parameters: Group, grads: Group, start: Group, lr: float) -> None:
        torch._foreach_add_(grads, torch._foreach_sub(parameters, start), alpha=mu)
        torch._foreach_add_(parameters, grads, alpha=-lr)

    return Rule(init, step)


def corrected(shift: dict[str, torch.Tensor]) -> Rule:
    """w ← w − η (g + s) with a given s: SCAFFOLD, whose s is c − c_k."""

    def init(named: dict[str, nn.Parameter]) -> Group:
        return [torch.empty_like(parameter).copy_(shift[name]) for name, parameter in named.items()]

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        torch._foreach_add_(grads, state)
        torch._foreach_add_(parameters, grads, alpha=-lr)

    return Rule(init, step)


def masked(rule: Rule, mask: dict[str, torch.Tensor]) -> Rule:
    """A rule under which the weights that a mask leaves out get no gradient, and so stay zero."""
    if not mask:
        return rule

    def init(named: dict[str, nn.Parameter]) -> Group:
        kept = [
            torch.empty_like(parameter).copy_(mask[name]) if name in mask else torch.ones_like(parameter)
            for name, parameter in named.items()
        ]
        return kept + rule.init(named)

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        count = len(parameters)
        torch._foreach_mul_(grads, state[:count])
        rule.step(parameters, grads, state[count:], lr)

    return Rule(init, step, rule.together)


def watched(rule: Rule, see: Watch) -> Rule:
    """A rule that shows each step's gradients first, by parameter name."""
    names: list[str] = []

    def init(named: dict[str, nn.Parameter]) -> Group:
        names[:] = named
        return rule.init(named)

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        see(dict(zip(names, grads, strict=True)))
        rule.step(parameters, grads, state, lr)

    return Rule(init, step, together=False)


def adam(
    clip: float = math.inf,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> Rule:
    """Adam with bias correction, on gradients whose joint norm is clipped; decay adds λ w to them."""

    def init(named: dict[str, nn.Parameter]) -> Group:
        zeros = [torch.zeros_like(parameter) for _ in range(2) for parameter in named.values()]
        return [torch.zeros(()), *zeros]

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        count, half = state[0].add_(1).item(), len(parameters) + 1
        means, squares = state[1:half], state[half:]
        if clip < math.inf:
            norm = torch.stack(torch._foreach_norm(grads)).norm().item()
            if norm > clip:
                torch._foreach_mul_(grads, clip / norm)
        if weight_decay:
            torch._foreach_add_(grads, parameters, alpha=weight_decay)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(roots, epsilon)
        torch._foreach_addcdiv_(parameters, means, roots, -lr / (1 - beta1**count))

    return Rule(init, step, together=False)


def to_input(images: torch.Tensor) -> torch.Tensor:
    """Bytes [n, h, w, c] as floats in [0, 1], seen as [n, c, h, w]: channels-last in memory, no copy more."""
    return images.permute(0, 3, 1, 2) / 255


def batches(
    samples: Samples, epochs: int, size: int, rng: np.random.Generator, *, augment: bool
) -> Iterator[Batch]:
    """E epochs of ⌈n/B⌉ shuffled batches; the last one of an epoch may be smaller, none is dropped."""
    device = samples.labels.device
    source = samples.images.cpu().numpy()
    if augment:
        source = pad(source)
    for _ in range(epochs):
        order = rng.permutation(len(samples))
        images = torch.from_numpy(crop_and_flip(source, order, rng) if augment else source[order]).to(device)
        labels = samples.labels[torch.from_numpy(order).to(device)]
        for start in range(0, len(samples), size):
            yield to_input(images[start : start + size]), labels[start : start + size]


def fit(
    network: nn.Module,
    data: Iterable[Batch],
    rule: Rule,
    lr: float | Schedule,
    loss: Loss = F.cross_entropy,
) -> int:
    """Train `network` in place, one step a batch; returns the number of steps."""
    network.train()
    named = dict(network.named_parameters())
    parameters: Group = list(named.values())

    def gradients(batch: Batch) -> Group:
        inputs, targets = batch
        return list(torch.autograd.grad(loss(network(inputs), targets), parameters))

    with quick(network):
        return descend(data, gradients, parameters, rule, rule.init(named), lr)


def descend(
    data: Iterable[Any],
    gradients: Callable[[Any], Group],
    parameters: Group,
    rule: Rule,
    state: Group,
    lr: float | Schedule,
) -> int:
    """The loop: a step for each batch, or for each batch of several networks."""
    steps = 0
    for batch in data:
        grads = gradients(batch)
        with torch.no_grad():
            rule.step(parameters, grads, state, lr(steps) if callable(lr) else lr)
        steps += 1
    return steps


def full_gradient(network: nn.Module, samples: Samples) -> dict[str, torch.Tensor]:
    """∇ of the mean loss over all samples, without augmentation, in eval mode and in fixed chunks."""
    network.eval()
    named = dict(network.named_parameters())
    total = [torch.zeros_like(parameter) for parameter in named.values()]
    for start in range(0, len(samples), 250):
        stretch = slice(start, start + 250)
        outputs = network(to_input(samples.images[stretch]))
        loss = F.cross_entropy(outputs, samples.labels[stretch], reduction="sum")
        torch._foreach_add_(total, list(torch.autograd.grad(loss, list(named.values()))))
    return {name: grad / len(samples) for name, grad in zip(named, total, strict=True)}
