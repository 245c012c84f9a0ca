"""Median and trimmed mean, coordinate by coordinate (Yin et al., 2018).

    median    w[i] = median of the w_k[i]
    trimmed   w[i] = mean of the w_k[i] without the b smallest and the b largest,  b = ⌊trim · m⌋ of m models

Both ignore n_k, as in the original: a weight is a claim of the device. With at most b hostile models (less
than half, for the median) every coordinate stays between the smallest and the largest honest value. All
models of a round are in memory; the result is computed a stretch of coordinates at a time.
"""

from __future__ import annotations

import torch

from feddumap.core.messages import Tensors
from feddumap.core.tensors import STRETCH
from feddumap.screening.rule import MeanReplacement


def trimmed_count(share: float, models: int) -> int:
    """⌊share · models⌋, whatever the rounding of the product.

    >>> trimmed_count(0.29, 100), trimmed_count(0.2, 4)
    (29, 0)
    """
    return int(share * models + 1e-9)


def trimmed_mean(models: list[Tensors], cut: int) -> Tensors:
    """The mean of each coordinate without its `cut` smallest and `cut` largest values: computed in float64
    and rounded once. Of integers, which are not averaged, the lower one of the middle values.

    >>> some = [{"w": torch.tensor([x])} for x in (1.0, 2.0, 6.0, 900.0)]
    >>> trimmed_mean(some, 1)["w"]
    tensor([4.])
    """
    found: Tensors = {}
    for name, first in models[0].items():
        flat = [tensors[name].reshape(-1) for tensors in models]
        result = torch.empty(first.numel(), dtype=first.dtype)
        for begin in range(0, len(result), STRETCH):
            here = slice(begin, begin + STRETCH)
            values = torch.stack([one[here] for one in flat]).sort(dim=0).values
            if first.is_floating_point():
                kept = values[cut : len(models) - cut].double()
                result[here] = (kept.sum(dim=0) / len(kept)).to(first.dtype)
            else:
                result[here] = values[(len(models) - 1) // 2]
        found[name] = result.view(first.shape)
    return found


class Median(MeanReplacement):
    """The coordinate-wise median: all but the middle one or two values are cut."""

    def center(self, models: list[Tensors]) -> Tensors:
        return trimmed_mean(models, (len(models) - 1) // 2)


class Trimmed(MeanReplacement):
    """The coordinate-wise trimmed mean."""

    def center(self, models: list[Tensors]) -> Tensors:
        return trimmed_mean(models, trimmed_count(self.settings.trim, len(models)))
