"""Pruning rates of nodes and of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from feddumap.core.messages import Architecture, Question, Tensors
from feddumap.core.rng import stream
from feddumap.models import initialise, network, trainable
from feddumap.pruning.curvature.density import mass_above, stable_rate
from feddumap.pruning.curvature.gap import first_gap, fisher_spectrum, lipschitz_constant
from feddumap.pruning.curvature.lanczos import hessian, lanczos, to_coordinates
from feddumap.system.callbacks import Steps, ignore
from feddumap.training.backends import as_model
from feddumap.training.model import Model
from feddumap.training.samples import Samples

SAMPLES, STEPS = 100, 50
DEGREE_FLOOR = 1e-4
GAP_MAX_RATE = 0.6
Mode = Literal["density", "gap"]


@dataclass(frozen=True)
class NodeRate:
    """A node's rate p = m / d with L (gap rule only) and the extreme eigenvalues."""

    p: float
    m: int
    d: int
    lipschitz: float | None
    lambda_min: float
    lambda_max: float
    clamped: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def node_rate(
    model: Model | nn.Module,
    architecture: Architecture,
    samples: Samples,
    question: Question,
    seed: int,
    name: tuple[str | int, ...],
    progress: Steps = ignore,
) -> NodeRate:
    """p_k of one node on at most 100 of its samples, for the given model; `name` names its random streams.
    `progress` is told the Lanczos steps of the density rule, which take minutes with large networks."""
    mode: Mode = question.settings["mode"]
    max_rate: float | None = question.settings["max_rate"]
    batch = _subset(samples, seed, name)
    if mode == "density":
        size = sum(parameter.numel() for parameter in as_model(model).parameters)
        signs = stream(seed, "rate-probe", *name).integers(0, 2, size, dtype=np.int8)
        probe = to_coordinates(model, torch.from_numpy(signs).float() * 2 - 1)
        spectrum = lanczos(hessian(model, batch), probe, STEPS, progress)
        p = stable_rate(mass_above(spectrum))
        ends = float(spectrum.values[0]), float(spectrum.values[-1])
        rate = NodeRate(p, round(p * size), size, None, *ends)
    else:
        net = network(architecture, as_model(model).weights())
        values = fisher_spectrum(net, batch)
        first = initialise(architecture, seed)
        target = [first[key] for key in trainable(net)]
        lipschitz = lipschitz_constant(net, batch, target)
        gap = first_gap(values, lipschitz)
        rate = NodeRate(gap.rate, gap.m, gap.d, lipschitz, float(values[0]), float(values[-1]))
    limit = max_rate if max_rate is not None else GAP_MAX_RATE if mode == "gap" else 1.0
    return rate if rate.p <= limit else NodeRate(**{**asdict(rate), "p": limit, "clamped": True})


def _subset(samples: Samples, seed: int, name: tuple[str | int, ...]) -> Samples:
    if len(samples) <= SAMPLES:
        return samples
    chosen = stream(seed, "rate-batch", *name).choice(len(samples), SAMPLES, replace=False)
    index = torch.from_numpy(np.sort(chosen))
    return samples[index]


def node_weights(samples: Sequence[int], degrees: Sequence[float]) -> np.ndarray:
    """ω_k ∝ n_k / (D(P_k) + 1e-4), summing to 1.

    >>> node_weights([100, 100], [0.3, 0.3]).tolist()
    [0.5, 0.5]
    """
    raw = np.asarray(samples, dtype=np.float64) / (np.asarray(degrees, dtype=np.float64) + DEGREE_FLOOR)
    return np.asarray(raw / raw.sum())


def threshold(weights: Tensors, parameters: Sequence[str], rate: float) -> float:
    """V: the ⌊R p*⌋-th smallest |v| over all R trainable scalars, 0 where ⌊R p*⌋ = 0.

    >>> threshold({"w": torch.tensor([3.0, -1.0, 2.0, -4.0])}, ["w"], 0.5)
    2.0
    """
    scalars = torch.cat([weights[name].detach().reshape(-1) for name in parameters]).abs()
    position = math.floor(len(scalars) * rate)
    return float(scalars.kthvalue(position).values) if position else 0.0


def layer_rates(weights: Tensors, layers: Mapping[str, Sequence[str]], limit: float) -> dict[str, float]:
    """p_l: the share of a layer's convolution weights with |v| < V. A layer may be several convolutions that
    share their channels."""
    rates = {}
    for layer, members in layers.items():
        values = torch.cat([weights[f"{member}.weight"].reshape(-1) for member in members]).abs()
        rates[layer] = float((values < limit).double().mean())
    return rates


def lowest_ranked(rate: float, ranks: Sequence[float]) -> list[int]:
    """The ⌊p_l d_l⌋ filters of lowest rank, ties in order, keeping at least one filter; ascending.

    >>> lowest_ranked(0.5, [3.0, 0.0, 3.0, 1.0, 9.0])
    [1, 3]
    >>> lowest_ranked(1.0, [5.0, 4.0])
    [1]
    """
    count = min(math.floor(rate * len(ranks) + 1e-9), len(ranks) - 1)  # 0.29 · 100 is 29
    return sorted(int(index) for index in np.argsort(np.asarray(ranks), kind="stable")[:count])
