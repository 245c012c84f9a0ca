"""Arrays of inputs as they are stored: what they are is inferred from their type, and every value checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feddumap.config import DataConfig
from feddumap.core.messages import InputSpec, Kind
from feddumap.data.dataset import Inputs
from feddumap.errors import FeddumapError

CHANNELS = (1, 3, 4)
BYTES_OF_TEXT = 257  # a token per byte, and 0 for padding

Where = Callable[[int], str]
"""Names the place of a sample in errors: a file and its row."""


class Stored(NamedTuple):
    """Inputs [N, …] in the form in which `InputSpec` stores a kind; `vocabulary`, if known, of tokens."""

    kind: Kind
    inputs: Inputs
    vocabulary: int = 0


def to_stored(array: npt.NDArray[Any], kind: Kind | None, origin: str, where: Where) -> Stored:
    """A user's array as stored inputs.

    Bytes [N, h, w], [N, h, w, c] or [N, c, h, w] are images, floats are numbers, other integers [N, length]
    are tokens, unless `kind` says otherwise. `origin` names the array in errors, `where` one of its samples.

    >>> made = to_stored(np.zeros((2, 28, 28), np.uint8), None, "x", str)
    >>> made.kind, made.inputs.shape
    ('image', (2, 28, 28, 1))
    """
    kind = kind or _kind_of(array)
    if kind == "image" and array.dtype == np.uint8 and array.ndim in (3, 4) and array.size:
        found = _channels_last(array)
        if found is not None:
            return Stored("image", found)
    if kind == "numbers" and array.dtype.kind in "fiub" and array.ndim >= 1 and array.size:
        return Stored("numbers", _finite(array if array.ndim > 1 else array[:, None], where))
    if kind == "tokens" and array.dtype.kind in "iu" and array.ndim == 2 and array.size:
        return Stored("tokens", _tokens(array, where))
    expected = {
        "image": "uint8 (N, h, w), (N, h, w, c) with c = 1, 3 or 4, or (N, c, h, w) with c = 1 or 3",
        "numbers": "numbers (N, ...)",
        "tokens": "integers (N, length)",
        None: "images uint8 (N, h, w) or (N, h, w, c), numbers float (N, ...) or tokens integer (N, length)",
    }[kind]
    raise FeddumapError(f"{origin} is {array.dtype} {array.shape}: expected {expected}")


def _kind_of(array: npt.NDArray[Any]) -> Kind | None:
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        return "image"
    if array.dtype.kind == "f":
        return "numbers"
    return "tokens" if array.dtype.kind in "iu" and array.ndim == 2 else None


def _channels_last(array: npt.NDArray[Any]) -> Inputs | None:
    if array.ndim == 3:
        return array[..., None]
    if array.shape[-1] in CHANNELS:
        return array
    return array.transpose(0, 2, 3, 1) if array.shape[1] in (1, 3) else None


def _finite(array: npt.NDArray[Any], where: Where) -> Inputs:
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(array, np.float32)
    sound = np.isfinite(made.reshape(len(made), -1)).all(axis=1)
    if not sound.all():
        row = int(sound.argmin())
        value = made[row].ravel()[int(np.isfinite(made[row].ravel()).argmin())]
        raise FeddumapError(f"{where(row)} has the value {value}: expected finite numbers")
    return made


def _tokens(array: npt.NDArray[Any], where: Where) -> Inputs:
    smallest = array.min(axis=1)
    if (smallest < 0).any():
        row = int((smallest < 0).argmax())
        raise FeddumapError(f"{where(row)} has the token {smallest[row]}: expected 0 or more")
    if array.dtype.kind == "u" and array.max() >= 2**31:
        raise FeddumapError(f"{where(int(array.max(axis=1).argmax()))} has a token of more than 2**31")
    return array.astype(np.int64)


def text_tokens(texts: Sequence[str], length: int) -> tuple[Inputs, int]:
    """UTF-8 bytes + 1, padded with 0 to `length`, and the number of texts that were cut.

    >>> text_tokens(["ab", "a"], 2)
    (array([[98, 99],
           [98,  0]]), 0)
    """
    made = np.zeros((len(texts), length), np.int64)
    cut = 0
    for row, text in enumerate(texts):
        raw = text.encode("utf-8", "surrogatepass")
        cut += len(raw) > length
        made[row, : min(len(raw), length)] = np.frombuffer(raw[:length], np.uint8).astype(np.int64) + 1
    return made, cut


def spec_of(stored: Sequence[Stored], places: Sequence[Where], vocabulary: int | None) -> InputSpec:
    """The form that the parts of a data set have in common; `places` name their samples in errors.

    Images are shifted by an eighth of their shorter side while training, and not mirrored.
    """
    first = stored[0]
    for other, where in zip(stored[1:], places[1:], strict=True):
        if (other.kind, other.inputs.shape[1:]) != (first.kind, first.inputs.shape[1:]):
            raise FeddumapError(
                f"{where(0)} is {other.kind} {other.inputs.shape[1:]}, the training part {first.kind} "
                f"{first.inputs.shape[1:]}: expected the same"
            )
    shape = first.inputs.shape[1:]
    if first.kind == "image":
        height, width, channels = shape
        return InputSpec("image", (channels, height, width), crop=max(1, min(height, width) // 8))
    if first.kind == "numbers":
        return InputSpec("numbers", shape)
    count = vocabulary or max(max(part.vocabulary, int(part.inputs.max()) + 1) for part in stored)
    for part, where in zip(stored, places, strict=True):
        largest = part.inputs.max(axis=1)
        if (largest >= count).any():
            row = int((largest >= count).argmax())
            raise FeddumapError(
                f"{where(row)} has the token {largest[row]}: expected 0 to {count - 1}, as data.vocabulary = "
                f"{count}"
            )
    return InputSpec("tokens", shape, vocabulary=count)


def adjusted(given: InputSpec, data: DataConfig) -> InputSpec:
    """The input with `data.crop`, `data.flip`, `data.mean` and `data.std`, where set.

    >>> adjusted(InputSpec("image", (1, 28, 28), crop=3), DataConfig(flip=True, mean=[0.1], std=[0.3]))
    InputSpec(kind='image', shape=(1, 28, 28), crop=3, flip=True, vocabulary=0, mean=(0.1,), std=(0.3,))
    """
    changes: dict[str, Any] = {
        key: value for key in ("crop", "flip") if (value := getattr(data, key)) is not None
    }
    if changes and given.kind != "image":
        key, value = next(iter(changes.items()))
        raise FeddumapError(f"data.{key} = {value}: the input is {given.describe()}, no image; remove it")
    if given.kind == "image" and changes.get("crop", 0) >= min(given.shape[1:]):
        limit = min(given.shape[1:])
        raise FeddumapError(f"data.crop = {changes['crop']}: expected less than {limit}, the shorter side")
    for key in ("mean", "std"):
        values = getattr(data, key)
        if values is None:
            continue
        channels = given.shape[0] if len(given.shape) == 3 else given.shape[-1]
        if given.kind == "tokens" or len(values) not in (1, channels):
            wanted = "none for tokens" if given.kind == "tokens" else f"1 or {channels} numbers"
            raise FeddumapError(f"data.{key} has {len(values)} numbers: expected {wanted}")
        changes[key] = tuple(values)
    if ("mean" in changes) != ("std" in changes):
        raise FeddumapError("data.mean and data.std: one is set, expected both or none")
    return replace(given, **changes)
