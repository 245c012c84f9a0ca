"""What flows between server and devices. Everything here is frozen and plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
"""Named tensors: weights, momentum, masks. Parameter-shaped ones carry the parameter's name."""


@dataclass(frozen=True)
class Architecture:
    """A network as data: family, number of classes and output channels of each convolution.

    Devices, checkpoints, cost counts and exports rebuild the network from it.
    """

    family: str
    classes: int
    channels: tuple[tuple[str, int], ...]

    @property
    def widths(self) -> dict[str, int]:
        return dict(self.channels)

    def to_json(self) -> dict[str, Any]:
        return {"family": self.family, "classes": self.classes, "channels": dict(self.channels)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Architecture:
        channels = tuple((str(name), int(width)) for name, width in value["channels"].items())
        return Architecture(str(value["family"]), int(value["classes"]), channels)


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to each chosen device."""

    round: int
    architecture: Architecture
    weights: Tensors
    lr: float
    extra: Tensors = field(default_factory=dict)
    mask: Tensors = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for group in (self.weights, self.extra) for tensor in group.values())


@dataclass(frozen=True)
class Upload:
    """What a device sends back after training."""

    device: int
    round: int
    samples: int
    steps: int
    weights: Tensors
    extra: Tensors = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for group in (self.weights, self.extra) for tensor in group.values())


@dataclass(frozen=True)
class Question:
    """What the server asks devices without training; `settings` must be JSON.

    A `light` question is answered at once, so that many devices may share a message.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    light: bool = False


@dataclass(frozen=True)
class Answer:
    """A device's answer: numbers in `values` (JSON), arrays in `tensors`."""

    device: int
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Eight bytes a number, and the tensors."""
        numbers = sum(len(value) if isinstance(value, list) else 1 for value in self.values.values())
        return 8 * numbers + sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class ServerState:
    """All that the server knows between two rounds. It is the checkpoint.

    `round` counts finished rounds. `steps` holds the server steps' own state, `shape` that of the
    reshaping step: named tensors, with a step's scalars as 0-dimensional tensors.
    """

    round: int
    architecture: Architecture
    weights: Tensors
    mask: Tensors = field(default_factory=dict)
    steps: Tensors = field(default_factory=dict)
    clock: float = 0.0
