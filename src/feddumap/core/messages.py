"""What flows between server and devices. Everything here is frozen and plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import torch

Tensors = dict[str, torch.Tensor]
"""Named tensors: weights, momentum, masks. Parameter-shaped ones carry the parameter's name."""


Kind = Literal["image", "numbers", "tokens"]


@dataclass(frozen=True)
class InputSpec:
    """One sample of a data set, as it is stored and as a network receives it.

    | kind | stored as | the network receives |
    |---|---|---|
    | image | uint8 [h, w, c] | float32 [c, h, w] in [0, 1], normalised by `mean` and `std` if given |
    | numbers | float32 of any `shape` | the same |
    | tokens | int64 [length], from 0 to `vocabulary` - 1 | the same |

    `shape` is what the network receives, without the batch. While training, an image is shifted by up to
    `crop` pixels and, with `flip`, mirrored with probability 1/2.

    >>> grey = InputSpec("image", (1, 28, 28), crop=3)
    >>> grey.stored_shape, grey.dtype, grey.example(2).shape
    ((28, 28, 1), 'uint8', torch.Size([2, 1, 28, 28]))
    """

    kind: Kind
    shape: tuple[int, ...]
    crop: int = 0
    flip: bool = False
    vocabulary: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def dtype(self) -> str:
        """The type of the stored numbers."""
        return {"image": "uint8", "numbers": "float32", "tokens": "int64"}[self.kind]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of a stored sample: an image has its channels last."""
        return (*self.shape[1:], self.shape[0]) if self.kind == "image" else self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of a stored sample."""
        return math.prod(self.shape) * {"image": 1, "numbers": 4, "tokens": 8}[self.kind]

    def example(self, batch: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A batch of zeros in the form that the network receives; floats are of type `dtype`."""
        return torch.zeros(batch, *self.shape, dtype=torch.int64 if self.kind == "tokens" else dtype)

    def random(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """A random batch in the form that the network receives."""
        if self.kind == "tokens":
            return torch.randint(0, self.vocabulary, (batch, *self.shape), generator=generator)
        draw = torch.rand if self.kind == "image" else torch.randn
        return draw(batch, *self.shape, generator=generator)

    def describe(self) -> str:
        """For tables and errors: `image 3×32×32`, `numbers 13`, `tokens 64 of 257`."""
        size = "×".join(map(str, self.shape))
        return f"{self.kind} {size}" + (f" of {self.vocabulary}" if self.kind == "tokens" else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> InputSpec:
        """Read `to_json`'s result back; anything else is a ValueError."""
        known = {field.name for field in fields(InputSpec)}
        if value.get("kind") not in get_args(Kind) or not value.keys() <= known:
            raise ValueError(f"an input of the kind {value.get('kind')!r}")
        tuples = {key: tuple(value.get(key, ())) for key in ("shape", "mean", "std")}
        whole = all(type(size) is int and 0 < size < 2**31 for size in tuples["shape"])
        counts = all(
            type(value.get(key, 0)) is int and value.get(key, 0) >= 0 for key in ("crop", "vocabulary")
        )
        if not (whole and counts and isinstance(value.get("flip", False), bool)):
            raise ValueError("an input whose sizes are not positive integers")
        if not tuples["shape"] or (value["kind"] == "image" and len(tuples["shape"]) != 3):
            raise ValueError(f"an input of the shape {tuples['shape']}")
        found = InputSpec(**{**value, **tuples})
        if fault := _input_fault(found):
            raise ValueError(f"an input whose {fault}")
        return found


def _input_fault(given: InputSpec) -> str | None:
    """What no data set of this kind and shape has."""
    image, tokens = given.kind == "image", given.kind == "tokens"
    if given.crop > (min(given.shape[1:]) if image else 0) or (given.flip and not image):
        return f"crop is {given.crop} and flip {given.flip}"
    if given.vocabulary >= 2**31 or (given.vocabulary > 0) != tokens:
        return f"vocabulary is {given.vocabulary}"
    channels = given.shape[0] if len(given.shape) == 3 else given.shape[-1]
    numbers = [*given.mean, *given.std]
    lengths = {len(given.mean), len(given.std)}
    if len(lengths) > 1 or not lengths <= ({0} if tokens else {0, 1, channels}):
        return f"mean and std have {len(given.mean)} and {len(given.std)} numbers"
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        return "mean or std is not finite"
    return None if all(number > 0 for number in given.std) else "std is not positive"


CIFAR_INPUT = InputSpec("image", (3, 32, 32), crop=4, flip=True)
"""The images of the paper's data sets."""


@dataclass(frozen=True)
class Architecture:
    """A network as data: family, number of classes, width of each 2-d convolution and of each other layer
    that has been narrowed (`channels`), its input, the keyword arguments of its factory (`settings`), and the
    SHA-256 of its frozen tensors (`frozen`), which are then no part of its weights.

    Devices, checkpoints, cost counts and exports rebuild the network from it.
    """

    family: str
    classes: int
    channels: tuple[tuple[str, int], ...]
    input: InputSpec = CIFAR_INPUT
    settings: tuple[tuple[str, Any], ...] = ()
    frozen: str = ""

    @property
    def widths(self) -> dict[str, int]:
        return dict(self.channels)

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "classes": self.classes,
            "channels": dict(self.channels),
            "input": self.input.to_json(),
            "settings": {key: _plain(value) for key, value in self.settings},
            **({"frozen": self.frozen} if self.frozen else {}),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Architecture:
        """Read `to_json`'s result back; what older versions did not write has its default."""
        channels = tuple((str(name), int(width)) for name, width in value["channels"].items())
        given = InputSpec.from_json(value["input"]) if "input" in value else CIFAR_INPUT
        settings = frozen_settings(value.get("settings", {}))
        frozen = str(value.get("frozen", ""))
        return Architecture(str(value["family"]), int(value["classes"]), channels, given, settings, frozen)


def frozen_settings(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Keyword arguments as a hashable value: lists become tuples.

    >>> frozen_settings({"widths": [8, 16], "dropout": 0.1})
    (('dropout', 0.1), ('widths', (8, 16)))
    """

    def freeze(value: Any) -> Any:
        return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value

    return tuple(sorted((str(key), freeze(value)) for key, value in settings.items()))


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


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
    factor: float = 1.0
    """What the server's screening multiplies its weight by; devices do not send it."""

    @property
    def weight(self) -> float:
        """Its weight in a mean: n_k, times what the screening gives it."""
        return self.samples * self.factor

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
    and none of them need be sent. With a `partial` one the server can do without the answers of some devices,
    with an `optional` one without any: then nobody is waited for.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    light: bool = False
    partial: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Answer:
    """A device's answer: numbers in `values` (JSON), arrays in `tensors`. To a `partial` or `optional`
    question there may be none; then `lost` says why."""

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
