"""What a device may claim to hold: as much as the server can know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from feddumap.device.holdings import SplitHoldings
from feddumap.device.surveys import label_counts

TOLERANCE = 1e-3  # of a label count that is computed from a gradient


@dataclass(frozen=True)
class Claims:
    """A device that holds a part of the data set holds exactly its part of the split; one with data of its
    own holds at most `most` samples."""

    holdings: SplitHoldings
    most: int

    def fault(self, device: int, own_data: bool, census: Mapping[str, Any]) -> str | None:
        """What is wrong with a device's answer to the census, or None."""
        samples = census["samples"]
        if own_data:
            too_many = f"tells {samples} samples of its own, more than run.most_samples = {self.most}"
            return too_many if samples > self.most else None
        labels = self.holdings.labels(device)
        if samples != len(labels):
            return f"tells {samples} samples, but its part of the data set has {len(labels)}"
        if census.keys() & {"counts", "gradient"}:
            told = label_counts(census)
            expected = np.bincount(labels, minlength=len(told))
            if told.shape != expected.shape or not np.allclose(told, expected, rtol=0, atol=TOLERANCE):
                return "tells other label counts than its part of the data set has"
        return None
