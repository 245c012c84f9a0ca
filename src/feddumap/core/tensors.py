"""Arithmetic on named tensors. Floats are computed with; integers (batch-norm counters) are carried."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from feddumap.core.messages import Tensors

DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
"""The types that tensors may have in messages."""

STRETCH = 1 << 18  # numbers that stay in the cache while they become float64
TOGETHER = 4  # parts that are added in one pass over the sum


def weighted_mean(parts: Iterable[tuple[float, Tensors]]) -> Tensors:
    """w = Σ n_k w_k / Σ n_k, a few parts in memory at a time.

    The sum is kept in float64: n_k · w_k is then exact, so one part comes back bit for bit, and the rounding
    happens once. Integer tensors are not averaged: the first part's are kept.

    >>> mean = weighted_mean([(1, {"w": torch.tensor([0.0])}), (3, {"w": torch.tensor([4.0])})])
    >>> mean["w"]
    tensor([3.])
    """
    total = 0.0
    sums: Tensors = {}
    dtypes: dict[str, torch.dtype] = {}
    scratch = torch.empty(STRETCH, dtype=torch.float64)
    source = iter(parts)
    while some := list(islice(source, TOGETHER)):
        total = sum((weight for weight, _ in some), start=total)
        for name, tensor in some[0][1].items():
            if name not in sums:
                dtypes[name] = tensor.dtype
                floats = tensor.is_floating_point()
                sums[name] = torch.zeros(tensor.shape, dtype=torch.float64) if floats else tensor.clone()
            if tensor.is_floating_point():
                _add(sums[name], [(weight, tensors[name]) for weight, tensors in some], scratch)
    if not sums:
        raise ValueError("the mean of no parts")
    return {
        name: torch.empty(value.shape, dtype=dtypes[name]).copy_(value.div_(total))
        if dtypes[name].is_floating_point
        else value
        for name, value in sums.items()
    }


def _add(total: torch.Tensor, parts: list[tuple[float, torch.Tensor]], scratch: torch.Tensor) -> None:
    """total += Σ weight · tensor, part by part, in stretches that stay in the cache meanwhile."""
    sums, flat = total.view(-1), [(weight, tensor.reshape(-1)) for weight, tensor in parts]
    for start in range(0, len(sums), STRETCH):
        into = sums[start : start + STRETCH]
        for weight, tensor in flat:
            into.add_(scratch[: len(into)].copy_(tensor[start : start + STRETCH]), alpha=weight)


def all_finite(tensors: Tensors) -> bool:
    """Whether no float is NaN or infinite: then neither are the smallest and the largest."""
    return all(
        math.isfinite(bound)
        for tensor in tensors.values()
        if tensor.is_floating_point() and tensor.numel()
        for bound in map(float, torch.aminmax(tensor))
    )


@dataclass(frozen=True)
class Form:
    """The type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a message: a bit for each truth value."""
        return -(-self.count // 8) if self.dtype == "bool" else self.count * DTYPES[self.dtype].itemsize


Forms = Mapping[str, Form]


def forms_of(tensors: Tensors) -> Forms:
    """The forms that some tensors have."""
    return {
        name: Form(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


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
        if tensor.numel():  # an empty one has no bytes to look at
            sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
