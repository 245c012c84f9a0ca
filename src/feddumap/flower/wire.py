"""Tensors as Flower's records and back. What comes in is checked before memory is made for it.

An array travels as the plain bytes of its numbers, little-endian and row by row, with its type and shape
(booleans as bits). Nothing that arrives is unpickled or executed, and whatever is wrong with it is a
`Refused`, which is a value: no message can stop a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from feddumap.types import Tensors

RAW, BITS = "feddumap.raw", "feddumap.bits"
MOST_BYTES = 2 << 30  # of a record's tensors
MOST_TENSORS = 100_000
MOST_TEXT = 4 << 20  # characters of a JSON text
DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
INTEGERS = range(-(2**53), 2**53)


@dataclass(frozen=True)
class Refused:
    """What is wrong with a message, or why there is none."""

    reason: str


class RefusedError(Exception):
    """The same on its way out of a reader, which returns it as `Refused`."""


@dataclass(frozen=True)
class Form:
    """What a tensor must be."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return -(-self.count // 8) if self.dtype == "bool" else self.count * DTYPES[self.dtype].itemsize


Forms = Mapping[str, Form]


def forms_of(tensors: Tensors) -> Forms:
    """The forms that some tensors have."""
    return {
        name: Form(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def pack(tensors: Tensors) -> ArrayRecord:
    """Tensors as a record."""
    arrays = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous().numpy()
        bits = plain.dtype == np.bool_
        data = np.packbits(plain) if bits else plain.astype(plain.dtype.newbyteorder("<"), copy=False)
        arrays[name] = Array(
            str(plain.dtype), tuple(plain.shape), BITS if bits else RAW, np.ascontiguousarray(data).tobytes()
        )
    return ArrayRecord(arrays)


def unpack(content: RecordDict, key: str, check: Callable[[Forms], str | None]) -> Tensors:
    """The tensors of a record. `check` tells what is wrong with their forms, before any of them is made."""
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(f"it has no arrays {key!r}")
    if len(record) > MOST_TENSORS:
        raise RefusedError(f"its {key} are {len(record)} tensors, more than {MOST_TENSORS}")
    forms = {name: _form(f"{key} {name[:100]!r}", array) for name, array in record.items()}
    if sum(form.nbytes for form in forms.values()) > MOST_BYTES:
        raise RefusedError(f"its {key} are larger than {MOST_BYTES} bytes")
    if problem := check(forms):
        raise RefusedError(f"its {key} {problem}")
    return {name: _tensor(form, record[name].data) for name, form in forms.items()}


def _form(name: str, array: Array) -> Form:
    """What an array claims to be, if its bytes can be that."""
    if array.dtype not in DTYPES or array.stype != (BITS if array.dtype == "bool" else RAW):
        raise RefusedError(
            f"its {name} is {array.dtype[:40]!r} in {array.stype[:40]!r}, which is unknown here"
        )
    if len(array.shape) > 8 or not all(0 <= size < 2**40 for size in array.shape):
        raise RefusedError(f"its {name} has the shape {str(array.shape)[:100]}")
    form = Form(array.dtype, tuple(array.shape))
    if form.nbytes != len(array.data):
        raise RefusedError(
            f"its {name} has {len(array.data)} bytes where {array.dtype} {form.shape} has {form.nbytes}"
        )
    return form


def _tensor(form: Form, data: bytes) -> torch.Tensor:
    if not form.count:
        return torch.empty(form.shape, dtype=DTYPES[form.dtype])
    if form.dtype == "bool":
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=form.count)
        return torch.from_numpy(bits.astype(np.bool_).reshape(form.shape))
    dtype = np.dtype(form.dtype)
    numbers = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)  # a copy, that may be written to
    return torch.from_numpy(numbers.reshape(form.shape))


def exactly(expected: Forms) -> Callable[[Forms], str | None]:
    """A check for tensors of these names and forms."""

    def check(found: Forms) -> str | None:
        if found.keys() != expected.keys():
            odd = sorted(found.keys() ^ expected.keys())
            return f"are not those expected ({odd[0][:100]!r} and {len(odd) - 1} other names differ)"
        for name, form in expected.items():
            if found[name] != form:
                return f"are of another form ({name!r} is {found[name]}, expected {form})"
        return None

    return check


def named_alike(weights: Forms) -> Callable[[Forms], str | None]:
    """A check for what comes along with weights: shaped like those it is named after, behind a slash."""

    def check(found: Forms) -> str | None:
        for name, form in found.items():
            if form != weights.get(name.rsplit("/", 1)[-1]):
                return f"are of another form ({name[:100]!r} is not like the weights it is named after)"
        if sum(form.nbytes for form in found.values()) > 64 * sum(form.nbytes for form in weights.values()):
            return "are more than 64 models"
        return None

    return check


def numbers_of(content: RecordDict, key: str) -> ConfigRecord:
    """A record of numbers and texts."""
    record = content.get(key)
    if not isinstance(record, ConfigRecord):
        raise RefusedError(f"it has no record {key!r}")
    return record


def integer(record: ConfigRecord, key: str, allowed: range = INTEGERS) -> int:
    value = record.get(key)
    if type(value) is not int or value not in allowed:
        raise RefusedError(
            f"its {key} is {str(value)[:40]!r}, expected a whole number from {allowed[0]} to {allowed[-1]}"
        )
    return value


def real(record: ConfigRecord, key: str) -> float:
    value = record.get(key)
    if type(value) is not float or not math.isfinite(value):
        raise RefusedError(f"its {key} is {str(value)[:40]!r}, expected a finite number")
    return value


def text(record: ConfigRecord, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise RefusedError(f"its {key} is missing, no text or longer than {MOST_TEXT} characters")
    return value


def flag(record: ConfigRecord, key: str) -> bool:
    value = record.get(key)
    if not isinstance(value, bool):
        raise RefusedError(f"its {key} is {str(value)[:40]!r}, expected true or false")
    return value


def mapping(record: ConfigRecord, key: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text(record, key), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"its {key} is not JSON ({str(error)[:100]})") from None
    if not isinstance(value, dict):
        raise RefusedError(f"its {key} is not a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
