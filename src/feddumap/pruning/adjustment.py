"""PruneFL's adjustment: which weights are worth the time they cost (Jiang et al.)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from feddumap.core.clock import Clock, Work
from feddumap.core.messages import Architecture, Tensors
from feddumap.models import build
from feddumap.models.cost import layer_macs, macs, parameters
from feddumap.pruning.masks import maskable

SHARE, HALF_LIFE = 0.3, 10_000
CONSTANT = 0.55
"""The part of a device's training time that no mask saves. PruneFL's authors give 17.4 of 31.5 s for VGG11
and 1.25 of 2.25 s for a smaller network, in the configurations of their published code."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a round: `fixed`, and so many more for each weight of a tensor."""

    fixed: float
    weight: Mapping[str, float]


def costs_of(architecture: Architecture, clock: Clock, devices: list[int], samples: np.ndarray) -> Costs:
    """T = T0 + Σ c_l |w_l|, which for all weights is a round of the virtual clock. c_l is a weight's share of
    the training time that masks can save, by its layer's multiply-adds, and the time to send it both ways; T0
    is what they cannot save, the constant part of training and the time to send what is never masked."""
    whole = macs(architecture)
    train = clock.round(devices, Work(whole, whole, 0, 0, samples, samples)).seconds
    send = clock.round(devices, Work(0, whole, 4, 4, samples, samples)).seconds
    per_layer = layer_macs(architecture)
    sizes = weight_sizes(architecture)
    weight = {
        name: (1 - CONSTANT) * train * per_layer[name.removesuffix(".weight")] / (whole * size) + send
        for name, size in sizes.items()
    }
    return Costs(CONSTANT * train + send * (parameters(architecture) - sum(sizes.values())), weight)


def weight_sizes(architecture: Architecture) -> dict[str, int]:
    named = dict(build(architecture).named_parameters())
    return {name: named[name].numel() for name in maskable(architecture, biases=False)}


def share_at(number: int) -> float:
    """ρ_t = 0.3 · 0.5^(t/10000): how much of each layer is up for discussion."""
    return float(SHARE * 0.5 ** (number / HALF_LIFE))


def adjust(weights: Tensors, mask: Tensors, squares: Tensors, costs: Costs, share: float) -> Tensors:
    """The mask that gains most a second, with g² as a weight's gain and c_l as its cost.

    Open to discussion are, of each tensor, the ρ smallest |w| in use and all that are not in use; the rest
    stays, and so does what has no mask. With N = Σ g² and T = T0 + Σ c_l over what stays, the open weight
    with the largest g²/c_l is taken as long as that exceeds N/T, which it then joins.
    """
    open_: dict[str, torch.Tensor] = {}
    gain = sum(float(square.double().sum()) for name, square in squares.items() if name not in mask)
    time = costs.fixed
    for name, used in mask.items():
        flat = used.reshape(-1)
        positions = flat.nonzero().reshape(-1)
        order = weights[name].reshape(-1)[positions].abs().argsort(stable=True)
        open_[name] = ~flat
        open_[name][positions[order[: math.floor(share * len(positions))]]] = True
        stays = ~open_[name]
        gain += float(squares[name].reshape(-1)[stays].double().sum())
        time += costs.weight[name] * int(stays.sum())
    gains = torch.cat([squares[name].reshape(-1)[choice].double() for name, choice in open_.items()])
    prices = torch.cat(
        [torch.full((int(c.sum()),), costs.weight[n], dtype=torch.float64) for n, c in open_.items()]
    )
    order = (gains / prices).argsort(descending=True, stable=True)
    before = gain + gains[order].cumsum(0) - gains[order], time + prices[order].cumsum(0) - prices[order]
    worth = gains[order] * before[1] > before[0] * prices[order]
    count = int(worth.long().cumprod(0).sum())
    taken = torch.zeros_like(gains, dtype=torch.bool)
    taken[order[:count]] = True
    adjusted: Tensors = {}
    for (name, choice), part in zip(
        open_.items(), torch.split(taken, [int(c.sum()) for c in open_.values()]), strict=True
    ):
        flat = ~choice
        flat[choice] = part
        adjusted[name] = flat.view_as(mask[name])
    return adjusted


def swap(weights: Tensors, mask: Tensors, dense: Tensors, new: Tensors) -> tuple[Tensors, Tensors]:
    """Weights under a new mask, and all weights: those that come back have the values they left with."""
    whole = {name: torch.where(mask[name], weights[name], dense[name]) for name in mask}
    return {**weights, **{name: whole[name] * new[name] for name in mask}}, whole
