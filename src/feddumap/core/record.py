"""The record of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, eq=False)
class Record(dict[str, Any]):
    """A round. It is also the dictionary of a line of records.jsonl, in which the `metrics` that the method
    reports are keys like the others.

    >>> record = Record.from_json({"round": 3, "accuracy": 0.5, "alpha": 0.1})
    >>> record.round, record["accuracy"], record["alpha"], record.metrics, record.loss
    (3, 0.5, 0.1, {'alpha': 0.1}, None)
    """

    round: int
    accuracy: float | None = None
    loss: float | None = None
    lr: float = 0.0
    devices: list[int] = field(default_factory=list)
    samples: int = 0
    parameters: int = 0
    macs: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    clock: float = 0.0
    wall: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.update({name: getattr(self, name) for name in FIELDS}, **self.metrics)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Record:
        own = {name: value[name] for name in FIELDS if name in value}
        return Record(**own, metrics={name: each for name, each in value.items() if name not in FIELDS})


FIELDS = tuple(each.name for each in fields(Record) if each.name != "metrics")
"""What every record has."""
