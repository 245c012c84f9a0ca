"""Arithmetic on named tensors. Floats are computed with; integers (batch-norm counters) are carried."""

import hashlib
from collections.abc import Iterable, Mapping

import torch

from feddumap.types import Tensors


def weighted_mean(parts: Iterable[tuple[float, Tensors]]) -> Tensors:
    """w = Σ n_k w_k / Σ n_k, one part in memory at a time.

    The sum is kept in float64: n_k · w_k is then exact, so one part comes back bit for bit, and the rounding
    happens once. Integer tensors are not averaged: the first part's are kept.

    >>> mean = weighted_mean([(1, {"w": torch.tensor([0.0])}), (3, {"w": torch.tensor([4.0])})])
    >>> mean["w"]
    tensor([3.])
    """
    total = 0.0
    sums: Tensors = {}
    dtypes: dict[str, torch.dtype] = {}
    for weight, tensors in parts:
        total += weight
        for name, tensor in tensors.items():
            if name not in sums:
                dtypes[name] = tensor.dtype
                sums[name] = tensor.double() * weight if tensor.is_floating_point() else tensor.clone()
            elif tensor.is_floating_point():
                sums[name].add_(tensor, alpha=weight)
    if not sums:
        raise ValueError("the mean of no parts")
    return {
        name: (value / total).to(dtypes[name]) if dtypes[name].is_floating_point else value
        for name, value in sums.items()
    }


def all_finite(tensors: Tensors) -> bool:
    """Whether no float is NaN or infinite. A sum is finite only if its terms are, and is cheap to take."""
    return all(
        bool(torch.isfinite(tensor.sum(dtype=torch.float64)))
        for tensor in tensors.values()
        if tensor.is_floating_point()
    )


def same_form(tensors: Tensors, like: Mapping[str, torch.Tensor]) -> bool:
    """Whether two groups agree in names, shapes and types."""
    return tensors.keys() == like.keys() and all(
        tensor.shape == like[name].shape and tensor.dtype == like[name].dtype
        for name, tensor in tensors.items()
    )


def digest(tensors: Tensors) -> str:
    """SHA-256 over names, types, shapes and bytes: equal digests mean equal bits."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
