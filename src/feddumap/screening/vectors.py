"""Uploads as vectors: the groups of tensors in them, their norms, and the inner products between uploads.

The weights are one group, taken as the update w_k − w; what comes along under a prefix (`c/`, `v/`) is
another one, taken as it is. Integer tensors (batch norm's counters) belong to none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from feddumap.core.messages import Tensors
from feddumap.core.tensors import STRETCH

WEIGHTS = "weights"
"""The name of the weights' group."""


def groups(tensors: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """The names of the float tensors in each group; `start` names the weights.

    >>> w = torch.zeros(2)
    >>> groups({"fc": w, "count": torch.tensor(3), "c/fc": w}, {"fc": w, "count": torch.tensor(0)})
    {'weights': ['fc'], 'c': ['c/fc']}
    """
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            group = WEIGHTS if name in start else name.rpartition("/")[0]
            found.setdefault(group, []).append(name)
    return found


def update(tensor: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    """A tensor as a part of its group's vector: flat, so that sums have one order whatever the layout in
    memory, and in float64, in which no two finite floats overflow."""
    flat = tensor.reshape(-1).to(torch.float64, copy=True)
    return flat if start is None else flat.sub_(start.reshape(-1))


def norm(tensors: Tensors, names: Sequence[str], start: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean norm of a group."""
    squares = (update(tensors[name], start.get(name)).square_().sum() for name in names)
    return math.sqrt(math.fsum(map(float, squares)))


def scaled(
    tensors: Tensors, names: Sequence[str], start: Mapping[str, torch.Tensor], factor: float
) -> Tensors:
    """A group's tensors with the vector times `factor`."""
    found: Tensors = {}
    for name in names:
        vector = update(tensors[name], start.get(name)).mul_(factor)
        if name in start:
            vector.add_(start[name].reshape(-1))
        found[name] = vector.to(tensors[name].dtype).view(tensors[name].shape)
    return found


def inner_products(
    many: Sequence[Tensors], names: Sequence[str], start: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """⟨g_i, g_j⟩ of a group for all pairs of uploads, in float64, a stretch of coordinates at a time."""
    total = torch.zeros(len(many), len(many), dtype=torch.float64)
    for name in names:
        flat = [tensors[name].reshape(-1) for tensors in many]
        origin = start[name].reshape(-1) if name in start else None
        for begin in range(0, len(flat[0]), STRETCH):
            here = slice(begin, begin + STRETCH)
            rows = torch.stack([update(one[here], None if origin is None else origin[here]) for one in flat])
            total += rows @ rows.T
    return (total + total.T) / 2  # a matrix product need not be symmetric to the last bit


def squared_distances(products: torch.Tensor) -> torch.Tensor:
    """‖g_i − g_j‖² from inner products.

    >>> squared_distances(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))
    tensor([[0., 5.],
            [5., 0.]])
    """
    own = products.diagonal()
    found = (own[:, None] + own[None, :] - 2 * products).clamp_min_(0)
    return found.fill_diagonal_(0)
