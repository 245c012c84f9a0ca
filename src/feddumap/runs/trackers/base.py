"""What a tracker is: it shows the numbers of a run's records in a program of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Tracker(Protocol):
    """Gets the record of each further round."""

    def add(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of a record, except the round.

    >>> numbers({"round": 3, "accuracy": None, "loss": 0.5, "devices": [1, 2], "samples": 20, "late": True})
    {'loss': 0.5, 'samples': 20.0}
    """
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "round"
    }
