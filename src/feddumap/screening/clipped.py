"""Norm clipping (Sun et al., 2019): no update may be much longer than those of recent rounds.

    w_k ← w + min(1, M · m / ‖w_k − w‖) · (w_k − w),   then the method's own mean

M is `aggregate.multiple`, m the median over the last ten rounds of each round's median norm. Norms are taken
before clipping, of all float tensors of the model, batch norm's statistics included. Each group of tensors
that comes along (SCAFFOLD's control variates, FedDA's momentum) is clipped by its own norm in the same way.

One upload is in memory at a time. Only a round without a history, the first one, holds its uploads until it
knows the median of their own norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from feddumap.core.algorithm import RoundView
from feddumap.core.messages import Tensors, Upload
from feddumap.screening.rule import Rule
from feddumap.screening.vectors import WEIGHTS, groups, norm, scaled

RECENT = 10
"""Rounds in the history."""
NORMS = "norms/"


class Clipped(Rule):
    """Clips updates; keeps the median norms of recent rounds under `norms/`."""

    def __init__(self, tensors: Tensors, view: RoundView) -> None:
        super().__init__(tensors, view)
        self.factors: dict[str, float] = {}
        self.bounds: dict[str, float] = {}
        self._norms: dict[str, list[float]] = {}

    def admit(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
        source = iter(uploads)
        held = [first for first in [next(source, None)] if first is not None]
        for upload in held:
            known = groups({**upload.weights, **upload.extra}, self.view.state.weights)
            if any(f"{NORMS}{group}" not in self.tensors for group in known):
                held += source
        measured = [(upload, self._measure(upload)) for upload in held]
        history = {name.removeprefix(NORMS): kept for name, kept in self.tensors.items()}
        medians = {group: float(np.median(own)) for group, own in self._norms.items()}
        medians |= {group: float(np.median(kept.numpy())) for group, kept in history.items()}
        self.bounds = {group: self.settings.multiple * median for group, median in medians.items()}
        for upload, norms in chain(measured, ((upload, self._measure(upload)) for upload in source)):
            yield self._clip(upload, norms)

    def _measure(self, upload: Upload) -> dict[str, float]:
        tensors, start = {**upload.weights, **upload.extra}, self.view.state.weights
        norms = {group: norm(tensors, names, start) for group, names in groups(tensors, start).items()}
        for group, value in norms.items():
            self._norms.setdefault(group, []).append(value)
        return norms

    def _clip(self, upload: Upload, norms: dict[str, float]) -> Upload:
        bounds = self.bounds
        factors = {
            group: bounds[group] / value for group, value in norms.items() if value > bounds.get(group, value)
        }
        if not factors:
            return upload
        self.factors[str(upload.device)] = min(factors.values())
        start, tensors = self.view.state.weights, {**upload.weights, **upload.extra}
        found: Tensors = {}
        for group, names in groups(tensors, start).items():
            if group in factors:
                found |= scaled(tensors, names, start, factors[group])
        return replace(
            upload,
            weights={name: found.get(name, tensor) for name, tensor in upload.weights.items()},
            extra={name: found.get(name, tensor) for name, tensor in upload.extra.items()},
        )

    def end(self) -> tuple[Tensors, dict[str, Any]]:
        _, metrics = super().end()
        kept = dict(self.tensors)
        for group, own in self._norms.items():
            before = kept.get(f"{NORMS}{group}", torch.zeros(0, dtype=torch.float64))
            newest = torch.tensor([float(np.median(own))], dtype=torch.float64)
            kept[f"{NORMS}{group}"] = torch.cat([before, newest])[-RECENT:]
        if self.factors:
            metrics = {**metrics, "clipped": self.factors}
        return kept, {**metrics, "clip_norm": self.bounds[WEIGHTS]} if self.bounds else metrics
