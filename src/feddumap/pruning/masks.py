"""Masks: masked weights remain in the network as zeros and are neither trained nor sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from feddumap.core.algorithm import Metrics
from feddumap.core.messages import Architecture, ServerState, Tensors
from feddumap.models.cost import layer_macs, macs, parameter_names, parameters


def maskable(architecture: Architecture, *, biases: bool) -> list[str]:
    """The names of the weights of convolutions and linear layers, and with `biases` of their biases."""
    known = parameter_names(architecture)
    kinds = ("weight", "bias") if biases else ("weight",)
    names = (f"{layer}.{kind}" for layer in layer_macs(architecture) for kind in kinds)
    return [name for name in names if name in known]


def magnitude_mask(weights: Tensors, names: Sequence[str], rate: float) -> Tensors:
    """The mask without the ⌊R p⌋ smallest |w| among all R weights; ties are masked in order.

    >>> magnitude_mask({"a": torch.tensor([3.0, -1.0]), "b": torch.tensor([1.0, 0.5])}, ["a", "b"], 0.5)
    {'a': tensor([ True, False]), 'b': tensor([ True, False])}
    """
    values = torch.cat([weights[name].reshape(-1) for name in names]).abs()
    kept = torch.ones_like(values, dtype=torch.bool)
    kept[values.argsort(stable=True)[: math.floor(len(values) * rate)]] = False
    parts = torch.split(kept, [weights[name].numel() for name in names])
    return {name: part.view_as(weights[name]).clone() for name, part in zip(names, parts, strict=True)}


def mask_tensors(tensors: Tensors, mask: Tensors) -> Tensors:
    """Tensors named after parameters and of their shapes, with or without a prefix, with zeros for masked
    weights."""

    def masked(name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = mask.get(name.rsplit("/", 1)[-1])
        return tensor if kept is None or kept.shape != tensor.shape else tensor * kept

    return {name: masked(name, tensor) for name, tensor in tensors.items()}


def apply_mask(state: ServerState, mask: Tensors) -> ServerState:
    """The state under a mask: masked weights and their momentum are zero."""
    weights, steps = mask_tensors(state.weights, mask), mask_tensors(state.steps, mask)
    return replace(state, weights=weights, steps=steps, mask=mask)


def changes(before: ServerState, mask: Tensors) -> Metrics:
    """The weights that a mask keeps, by tensor and in total. Multiply-adds do not change: zeros are
    multiplied too."""
    layers: dict[str, dict[str, Any]] = {}
    for name, kept in mask.items():
        count, left = kept.numel(), int(kept.sum())
        layers[name] = {"rate": 1 - left / count, "weights": count, "kept": left}
    whole, cost = parameters(before.architecture), macs(before.architecture)
    masked_before, masked = (sum(int((~kept).sum()) for kept in m.values()) for m in (before.mask, mask))
    return {
        "layers": layers,
        "parameters": {"before": whole - masked_before, "after": whole - masked},
        "macs": {"before": cost, "after": cost},
    }
