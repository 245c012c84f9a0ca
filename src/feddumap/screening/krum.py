"""Krum and Multi-Krum (Blanchard et al., 2017): only the models that have close neighbours count.

    s_i = Σ ‖w_i − w_j‖² over the m − f − 2 nearest j ≠ i,   f = ⌈hostile · m⌉ of the m models of a round

Krum keeps the model with the smallest s_i, Multi-Krum the m − f smallest; the method then averages those kept
as it always does. Of what else uploads carry, each group's squared distances are divided by the square of its
median norm and added. All models of a round are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from feddumap.core.messages import Upload
from feddumap.screening.rule import Rule
from feddumap.screening.vectors import groups, inner_products, squared_distances


def hostile_count(share: float, models: int) -> int:
    """⌈share · models⌉, whatever the rounding of the product.

    >>> hostile_count(0.2, 10), hostile_count(0.2, 11), hostile_count(0.07, 100)
    (2, 3, 7)
    """
    return math.ceil(share * models - 1e-9)


def scores(distances: torch.Tensor, hostile: int) -> torch.Tensor:
    """s_i from squared distances; with fewer than `hostile` + 3 models, the nearest one alone counts.

    >>> x = torch.tensor([0.0, 1.0, 3.0, 100.0])
    >>> scores((x[:, None] - x) ** 2, 1)
    tensor([1.0000e+00, 1.0000e+00, 4.0000e+00, 9.4090e+03])
    """
    models = len(distances)
    if models == 1:
        return torch.zeros(1, dtype=distances.dtype)
    nearest = distances.sort(dim=1).values[:, 1:]  # without the distance to itself
    return nearest[:, : max(1, models - hostile - 2)].sum(dim=1)


class MultiKrum(Rule):
    """Leaves out the f models that are farthest from the others."""

    def admit(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
        held = list(uploads)
        if not held:
            return
        hostile = hostile_count(self.settings.hostile, len(held))
        score = scores(self._distances(held), hostile)
        kept = set(score.argsort(stable=True)[: self.kept(len(held), hostile)].tolist())
        for place, upload in enumerate(held):
            if place in kept:
                yield upload
            else:
                self.left_out[str(upload.device)] = self.reason(len(held), len(kept))

    def kept(self, models: int, hostile: int) -> int:
        """How many models count."""
        return max(1, models - hostile)

    def reason(self, models: int, kept: int) -> str:
        return f"its model is not among the {kept} of {models} that are nearest to each other"

    def _distances(self, held: list[Upload]) -> torch.Tensor:
        start = self.view.state.weights
        tensors = [{**upload.weights, **upload.extra} for upload in held]
        total = torch.zeros(len(held), len(held), dtype=torch.float64)
        for names in groups(tensors[0], start).values():
            products = inner_products(tensors, names, start)
            median = float(products.diagonal().quantile(0.5))
            total += squared_distances(products) / (median or 1.0)
        return total


class Krum(MultiKrum):
    """Leaves out all models but the one that has the closest neighbours."""

    def kept(self, models: int, hostile: int) -> int:
        return 1
