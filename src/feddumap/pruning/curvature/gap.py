"""The `gap` rule, as in the paper's text: the first gap of the spectrum that exceeds 4L."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from feddumap.models import trainable
from feddumap.pruning.curvature.lanczos import Product, check_finite, flat, hessian, loss_of
from feddumap.training.samples import Samples

SECANTS = 8
NUMERICAL_RANK = 1e-6
BLOCK_BYTES = 1 << 30


class Gap(NamedTuple):
    """m of d eigenvalues are below the first gap; m = 0 if no gap is large enough."""

    m: int
    d: int

    @property
    def rate(self) -> float:
        return self.m / self.d if self.d else 0.0


def first_gap(values: np.ndarray, lipschitz: float) -> Gap:
    """The first m with λ^(m+1) − λ^(m) > 4L among the d eigenvalues above 1e-6 λ_max, ascending.

    >>> first_gap(np.array([0.0, 1.0, 1.5, 9.0, 9.5]), lipschitz=1.0)
    Gap(m=2, d=4)
    >>> first_gap(np.array([1.0, 2.0, 3.0]), lipschitz=1.0)
    Gap(m=0, d=3)
    """
    values = np.sort(values)
    kept = values[values > NUMERICAL_RANK * values.max()] if len(values) and values.max() > 0 else values[:0]
    wide = np.flatnonzero(np.diff(kept) > 4 * lipschitz)
    return Gap(int(wide[0]) + 1 if len(wide) else 0, len(kept))


def fisher_spectrum(network: nn.Module, samples: Samples) -> np.ndarray:
    """Non-zero eigenvalues of the empirical Fisher F = Σ g_i g_iᵀ / n, ascending.

    They are those of the Gram matrix K_ij = g_i · g_j / n of the samples' gradients, which is only n × n. It
    is summed over blocks of parameters, so that n gradients of a large network need not fit in memory.
    """
    count = len(samples)
    gram = torch.zeros(count, count, dtype=torch.float64)
    for block in _blocks(list(trainable(network).values()), count):
        gradients = torch.stack(
            [
                flat(torch.autograd.grad(loss_of(network, one), block, materialize_grads=True))
                for one in _singles(samples)
            ]
        )
        gram += (gradients @ gradients.T).double()
    check_finite(gram.numpy())
    return np.linalg.eigvalsh((gram / count).numpy())


def _singles(samples: Samples) -> list[Samples]:
    return [samples[i : i + 1] for i in range(len(samples))]


def _blocks(parameters: list[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Blocks of parameters of which `count` gradients take at most about a gigabyte."""
    blocks: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        size += 4 * count * parameter.numel()
        if blocks[-1] and size > BLOCK_BYTES:
            blocks.append([])
            size = 4 * count * parameter.numel()
        blocks[-1].append(parameter)
    return blocks


def lipschitz_constant(
    network: nn.Module, samples: Samples, target: list[torch.Tensor], product: Product | None = None
) -> float:
    """The largest slope of 8 secants of B(Δ) = H(W')Δ − ∇L(W' + Δ) between W' and `target` (W_init).

    For a quadratic loss B is constant, so L = 0. The parameters of the network are modified and restored.
    """
    product = product or hessian(network, samples)
    parameters = list(trainable(network).values())
    start = [parameter.detach().clone() for parameter in parameters]
    step = flat([goal - origin for goal, origin in zip(target, start, strict=True)]) / SECANTS
    curvature, length = product(step), float(step.norm())
    if length == 0:
        return 0.0
    gradients = []
    for i in range(SECANTS + 1):
        with torch.no_grad():
            for parameter, origin, goal in zip(parameters, start, target, strict=True):
                parameter.copy_(torch.lerp(origin, goal, i / SECANTS))
        grads = torch.autograd.grad(loss_of(network, samples), parameters, materialize_grads=True)
        gradients.append(flat(grads))
    with torch.no_grad():
        for parameter, origin in zip(parameters, start, strict=True):
            parameter.copy_(origin)
    # B(Δ_{i+1}) − B(Δ_i) = H step − (∇L_{i+1} − ∇L_i)
    changes = [curvature - (after - before) for before, after in pairwise(gradients)]
    return max(float(change.norm()) for change in changes) / length
