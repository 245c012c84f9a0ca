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


def sent_bytes(tensors: Tensors, mask: Mapping[str, torch.Tensor] | None = None) -> int:
    """Bytes of the tensors without what a mask leaves out.

    >>> sent_bytes({"w": torch.zeros(4)}, {"w": torch.tensor([True, False, True, True])})
    12
    """
    kept = mask or {}
    return sum(
        int(kept[name].sum()) * tensor.element_size() if name in kept else tensor.nbytes
        for name, tensor in tensors.items()
    )


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
        """What is sent: the weights that the mask keeps, the mask as a bit for each of its weights, and all
        that comes along."""
        bitmaps = sum(-(-kept.numel() // 8) for kept in self.mask.values())
        return sent_bytes(self.weights, self.mask) + sent_bytes(self.extra) + bitmaps

    @property
    def reply_nbytes(self) -> int:
        """An upload that carries as much back; the mask is known by then."""
        return sent_bytes(self.weights, self.mask) + sent_bytes(self.extra)


@dataclass(frozen=True)
class Upload:
    """What a device sends back after training."""

    device: int
    round: int
    samples: int
    steps: int
    weights: Tensors
    extra: Tensors = field(default_factory=dict)
    finite: bool | None = None
    """Whether all its numbers are, if someone has looked."""

    def nbytes(self, mask: Tensors) -> int:
        """What is sent: the weights that the broadcast's mask keeps, and all that comes along."""
        return sent_bytes(self.weights, mask) + sent_bytes(self.extra)


@dataclass(frozen=True)
class MissingUpload:
    """What a cohort yields in place of an upload: why there is none. The round goes on without it."""

    device: int
    reason: str


@dataclass(frozen=True)
class Question:
    """What the server asks devices without training; `settings` must be JSON.

    A `light` question is answered at once and without the weights, so that many devices may share a message
    and none of them need be sent. With a `partial` one the server can do without the answers of some devices.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    light: bool = False
    partial: bool = False


@dataclass(frozen=True)
class Answer:
    """A device's answer: numbers in `values` (JSON), arrays in `tensors`. To a `partial` question there may
    be none; then `lost` says why."""

    device: int
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    lost: str = ""

    @property
    def nbytes(self) -> int:
        """Eight bytes a number, and the tensors."""
        numbers = sum(len(value) if isinstance(value, list) else 1 for value in self.values.values())
        return 8 * numbers + sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class ServerState:
    """All that the server knows between two rounds. It is the checkpoint.

    `round` counts finished rounds. `mask` tells, for each masked tensor, which of its weights are in use:
    the others are zero. `steps` holds the server steps' own state.
    """

    round: int
    architecture: Architecture
    weights: Tensors
    mask: Tensors = field(default_factory=dict)
    steps: Tensors = field(default_factory=dict)
    clock: float = 0.0
