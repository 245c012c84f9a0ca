"""The geometric median (RFA; Pillutla et al., 2022), by Weiszfeld's algorithm.

    w = argmin Σ n_k ‖w − w_k‖:   β_k = n_k / max(ν, ‖w − w_k‖),  w ← Σ β_k w_k / Σ β_k, until w settles

It tolerates hostile models with less than half of all samples. Each group of tensors that comes along has a
geometric median of its own. The iteration works on the inner products of the updates, so it costs one pass
over the models, however many steps it takes. All models of a round are in memory.
"""

from __future__ import annotations

import torch

from feddumap.core.messages import Tensors
from feddumap.core.screening import Parts
from feddumap.core.tensors import weighted_mean
from feddumap.screening.coordinatewise import trimmed_mean
from feddumap.screening.rule import MeanReplacement
from feddumap.screening.vectors import groups, inner_products

SMALLEST = 1e-6
"""ν, as a multiple of the median norm of the updates."""
TOLERANCE = 1e-9
"""The iteration ends when the median moves by less, as a multiple of the median norm of the updates."""


def shares(products: torch.Tensor, samples: torch.Tensor, iterations: int) -> torch.Tensor:
    """The shares β_k / Σ β with which the models enter their geometric median.

    >>> x = torch.tensor([[0.0], [1.0], [2.0], [1e6]], dtype=torch.float64)
    >>> found = shares(x @ x.T, torch.ones(4, dtype=torch.float64), 1000)
    >>> 1 <= float(found @ x) <= 2
    True
    """
    own = products.diagonal()
    length = float(own.quantile(0.5).sqrt()) or 1.0
    share = samples / samples.sum()
    for _ in range(iterations):
        towards = products @ share
        distances = (own - 2 * towards + share @ towards).clamp_min(0).sqrt()
        new = samples / distances.clamp_min(SMALLEST * length)
        new = new / new.sum()
        step = new - share
        share = new
        if float(step @ products @ step) <= (TOLERANCE * length) ** 2:
            break
    return share


class GeometricMedian(MeanReplacement):
    """Combines models by their geometric median, weighted by n_k."""

    def combine(self, parts: Parts) -> Tensors:
        self.called = True
        weighed = [(weight, tensors) for weight, tensors in parts if weight > 0]
        if not weighed:
            raise ValueError("the mean of no parts")
        start, models = self.view.state.weights, [tensors for _, tensors in weighed]
        samples = torch.tensor([weight for weight, _ in weighed], dtype=torch.float64)
        found: Tensors = {}
        for names in groups(models[0], start).values():
            share = shares(inner_products(models, names, start), samples, self.settings.iterations).tolist()
            part = ({name: tensors[name] for name in names} for tensors in models)
            found |= weighted_mean(zip(share, part, strict=True))
        rest = [{name: t for name, t in tensors.items() if name not in found} for tensors in models]
        found |= trimmed_mean(rest, 0)  # integers: the middle one
        return {name: found[name] for name in models[0]}
