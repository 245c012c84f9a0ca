"""PruneFL's mask adjustment: the largest gain per second of a round (Jiang et al.)."""

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
"""The share of a device's training time that masks do not reduce: the configurations of PruneFL's published
code have 17.4 of 31.5 s for VGG11 and 1.25 of 2.25 s for a smaller network."""


@dataclass(frozen=True)
class Costs:
    """The duration of a round: `fixed` seconds, and seconds per weight of each tensor."""

    fixed: float
    weight: Mapping[str, float]


def weight_costs(architecture: Architecture, clock: Clock, devices: list[int], samples: np.ndarray) -> Costs:
    """T = T0 + Σ c_l |w_l|, which without a mask is the duration of a round by the virtual clock. c_l is a
    weight's share of the reducible training time, by the multiply-adds of its layer, plus the time to send it
    both ways; T0 is the constant part of training plus the time to send tensors without a mask."""
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


def adjustable_share(number: int) -> float:
    """ρ_t = 0.3 · 0.5^(t/10000): the share of the active weights of each tensor that may be pruned."""
    return float(SHARE * 0.5 ** (number / HALF_LIFE))


def adjust(weights: Tensors, mask: Tensors, squares: Tensors, costs: Costs, share: float) -> Tensors:
    """The mask with the largest gain per second, with g² as the gain of a weight and c_l as its cost.

    The candidates are, of each tensor, the share ρ of active weights with the smallest |w| and all inactive
    weights; the other weights and the tensors without a mask are kept. With N = Σ g² and T = T0 + Σ c_l over
    the weights kept so far, the candidate with the largest g²/c_l is added to them while it exceeds N/T."""
    candidates: dict[str, torch.Tensor] = {}
    gain = sum(float(square.double().sum()) for name, square in squares.items() if name not in mask)
    time = costs.fixed
    for name, used in mask.items():
        flat = used.reshape(-1)
        positions = flat.nonzero().reshape(-1)
        order = weights[name].reshape(-1)[positions].abs().argsort(stable=True)
        candidates[name] = ~flat
        candidates[name][positions[order[: math.floor(share * len(positions))]]] = True
        kept = ~candidates[name]
        gain += float(squares[name].reshape(-1)[kept].double().sum())
        time += costs.weight[name] * int(kept.sum())
    gains = torch.cat([squares[name].reshape(-1)[choice].double() for name, choice in candidates.items()])
    prices = torch.cat(
        [torch.full((int(c.sum()),), costs.weight[n], dtype=torch.float64) for n, c in candidates.items()]
    )
    order = (gains / prices).argsort(descending=True, stable=True)
    before = gain + gains[order].cumsum(0) - gains[order], time + prices[order].cumsum(0) - prices[order]
    worth = gains[order] * before[1] > before[0] * prices[order]
    count = int(worth.long().cumprod(0).sum())
    chosen = torch.zeros_like(gains, dtype=torch.bool)
    chosen[order[:count]] = True
    adjusted: Tensors = {}
    for (name, choice), part in zip(
        candidates.items(), torch.split(chosen, [int(c.sum()) for c in candidates.values()]), strict=True
    ):
        flat = ~choice
        flat[choice] = part
        adjusted[name] = flat.view_as(mask[name])
    return adjusted


def change_mask(weights: Tensors, mask: Tensors, dense: Tensors, new: Tensors) -> tuple[Tensors, Tensors]:
    """The weights under a new mask, and all weights with the last values of those pruned. Weights that become
    active again start from these values."""
    whole = {name: torch.where(mask[name], weights[name], dense[name]) for name in mask}
    return {**weights, **{name: whole[name] * new[name] for name in mask}}, whole
