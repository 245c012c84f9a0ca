"""The data that devices hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from feddumap.core.rng import stream
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split
from feddumap.training.samples import Samples


class Holdings(Protocol):
    """The data behind device numbers. Labels can be had without touching an image."""

    def labels(self, device: int) -> np.ndarray: ...

    def samples(self, device: int) -> Samples: ...

    def shared(self, device: int, limit: int) -> Samples:
        """At most `limit` of the server's samples, which the device was given before the first round."""
        ...


@dataclass(frozen=True)
class SplitHoldings:
    """Simulated devices: each holds its part of one data set."""

    dataset: Dataset
    split: Split
    seed: int

    def labels(self, device: int) -> np.ndarray:
        return self.dataset.train_labels[self.split.device(device)]

    def samples(self, device: int) -> Samples:
        return self._take(self.split.device(device))

    def shared(self, device: int, limit: int) -> Samples:
        server = self.split.server
        if limit < len(server):
            rng = stream(self.seed, "shared", device)
            server = np.sort(rng.choice(server, limit, replace=False))
        return self._take(server)

    def _take(self, indices: np.ndarray) -> Samples:
        return Samples.take(self.dataset.train_inputs, self.dataset.train_labels, indices)
