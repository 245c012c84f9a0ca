"""False updates: what a hostile device uploads in place of what it trained.

With the true update g = w_k − w and the strength s:

    sign-flip   w − s g
    scaling     w + s g        (a backdoor is scaled too: model replacement, Bagdasaryan et al., 2020)
    noise       w + g + s ‖g‖ z / √d,  z ~ N(0, I_d)

What an upload carries besides its weights is changed in the same way, around zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from feddumap.core.messages import Tensors

Lie = Callable[[Tensors, Mapping[str, torch.Tensor], float, np.random.Generator], Tensors]
"""What is sent in place of some tensors, given what they were before training (zero, if not named)."""


def _moved(tensors: Tensors, start: Mapping[str, torch.Tensor], by: float) -> Tensors:
    """start + by · (tensors − start); integers stay."""
    moved = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            moved[name] = tensor
        elif name in start:
            moved[name] = (start[name] + by * (tensor - start[name])).contiguous()
        else:
            moved[name] = by * tensor
    return moved


def sign_flip(
    tensors: Tensors, start: Mapping[str, torch.Tensor], scale: float, rng: np.random.Generator
) -> Tensors:
    return _moved(tensors, start, -scale)


def scaling(
    tensors: Tensors, start: Mapping[str, torch.Tensor], scale: float, rng: np.random.Generator
) -> Tensors:
    return _moved(tensors, start, scale)


def noise(
    tensors: Tensors, start: Mapping[str, torch.Tensor], scale: float, rng: np.random.Generator
) -> Tensors:
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    square, count = 0.0, 0
    for name, tensor in floats.items():
        change = tensor.double() - start[name].double() if name in start else tensor.double()
        square += float(change.reshape(-1).square().sum())
        count += tensor.numel()
    sigma = scale * math.sqrt(square / max(1, count))
    noisy = dict(tensors)
    for name, tensor in floats.items():
        drawn = torch.from_numpy(rng.standard_normal(tensor.shape)).to(tensor.dtype)
        noisy[name] = tensor + sigma * drawn
    return noisy


LIES: dict[str, Lie] = {"sign-flip": sign_flip, "scaling": scaling, "noise": noise, "backdoor": scaling}
"""The attacks on what is uploaded."""
