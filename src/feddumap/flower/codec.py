"""Tensors as Flower's records and back. Received ones are checked before memory is allocated for them.

The tensors of a record are sent as one array, since Flower makes several requests for each array: eight bytes
with the length of a header, the header, a JSON list of [name, type, shape], and the tensors' bytes one after
another, little-endian and row-major (booleans as bits). Nothing received is unpickled or executed. An invalid
message becomes a `Refused`, which is a value: no message can stop a run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from feddumap.core.messages import Tensors
from feddumap.core.tensors import DTYPES, Form, Forms, forms_of
from feddumap.errors import FeddumapError, printable, show
from feddumap.system.json_text import parse_json

PACKED, NAME = "feddumap.tensors", "tensors"  # the type and the name of Flower's array
LENGTH = 8  # bytes for the length of the header
MOST_BYTES, MOST_HEADER = 2 << 30, 4 << 20  # of a record
MOST_DIMENSIONS, LARGEST = 8, 2**40
MOST_REASON = 1_000  # characters
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Refused:
    """Why a message is invalid or missing: one line of printable characters, as it may quote the message."""

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason, MOST_REASON))


class RefusedError(Exception):
    """Raised inside a reader, which returns it as `Refused`."""


def reader(read: Callable[P, T]) -> Callable[P, T | Refused]:
    """Decorate a reader to return `Refused` where it raises `RefusedError`."""

    @wraps(read)
    def returning(*args: P.args, **kwargs: P.kwargs) -> T | Refused:
        try:
            return read(*args, **kwargs)
        except (RefusedError, FeddumapError) as error:
            return Refused(str(error))

    return returning


def pack(**groups: Tensors) -> dict[str, ArrayRecord]:
    """Records of tensors; a group without any has no record."""
    return {
        key: ArrayRecord({NAME: Array("uint8", (len(data),), PACKED, data)})
        for key, tensors in groups.items()
        if tensors and (data := _to_bytes(tensors))
    }


def unpack(content: RecordDict, key: str, check: Callable[[Forms], str | None]) -> Tensors:
    """The tensors of a record. `check` returns what is wrong with their forms, before any is allocated."""
    forms, data = _forms(_data(content[key], key), key) if key in content else ({}, memoryview(b""))
    if problem := check(forms):
        raise RefusedError(f"its {key} {problem}")
    found, start = {}, 0
    for name, form in forms.items():
        found[name] = _tensor(form, data[start : start + form.nbytes])
        start += form.nbytes
    return found


def _to_bytes(tensors: Tensors) -> bytes:
    forms = forms_of(tensors)
    header = json.dumps([[name, form.dtype, form.shape] for name, form in forms.items()]).encode()
    parts = [struct.pack("<Q", len(header)), header]
    for tensor in tensors.values():
        plain = tensor.detach().cpu().contiguous().numpy()
        bits = plain.dtype == np.bool_
        data = np.packbits(plain) if bits else plain.astype(plain.dtype.newbyteorder("<"), copy=False)
        parts.append(np.ascontiguousarray(data).tobytes())
    return b"".join(parts)


def _data(record: object, key: str) -> memoryview:
    """The bytes of a record that has one array of them."""
    array = record.get(NAME) if isinstance(record, ArrayRecord) and len(record) == 1 else None
    if array is None or (array.dtype, array.stype) != ("uint8", PACKED):
        raise RefusedError(f"its {key} are no tensors")
    if len(array.data) > MOST_BYTES:
        raise RefusedError(f"its {key} are larger than {MOST_BYTES} bytes")
    return memoryview(array.data)


def _forms(data: memoryview, key: str) -> tuple[dict[str, Form], memoryview]:
    """The forms that the header gives, if they fit the bytes that follow, and those bytes."""
    size = int.from_bytes(data[:LENGTH], "little")
    if len(data) < LENGTH or size > min(MOST_HEADER, len(data) - LENGTH):
        raise RefusedError(f"its {key} have no whole header")
    try:
        header = parse_json(bytes(data[LENGTH : LENGTH + size]))
    except ValueError as error:
        raise RefusedError(f"the header of its {key} is not JSON ({str(error)[:100]})") from None
    if not isinstance(header, list):
        raise RefusedError(f"the header of its {key} is no list")
    forms = dict(_form(entry, key) for entry in header)
    if len(forms) != len(header):
        raise RefusedError(f"its {key} have a name twice")
    rest = data[LENGTH + size :]
    whole = sum(form.nbytes for form in forms.values())
    if whole != len(rest):
        raise RefusedError(f"its {key} have {len(rest)} bytes where their header says {whole}")
    return forms, rest


def _form(entry: object, key: str) -> tuple[str, Form]:
    match entry:
        case [str(name), str(dtype), [*sizes]] if dtype in DTYPES and len(sizes) <= MOST_DIMENSIONS:
            shape = tuple(size for size in sizes if type(size) is int and 0 <= size < LARGEST)
            if len(shape) == len(sizes):
                return name, Form(dtype, shape)
    raise RefusedError(f"its {key} have a tensor of no known form ({show(entry)[:100]})")


def _tensor(form: Form, data: memoryview) -> torch.Tensor:
    if not form.count:
        return torch.empty(form.shape, dtype=DTYPES[form.dtype])
    if form.dtype == "bool":
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=form.count)
        return torch.from_numpy(bits.astype(np.bool_).reshape(form.shape))
    dtype = np.dtype(form.dtype)
    numbers = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)  # a writable copy
    return torch.from_numpy(numbers.reshape(form.shape))


def exactly(expected: Forms) -> Callable[[Forms], str | None]:
    """A check for tensors of exactly these names and forms."""

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
    """A check for tensors named PREFIX/WEIGHT, each with the form of that weight."""

    def check(found: Forms) -> str | None:
        for name, form in found.items():
            if form != weights.get(name.rsplit("/", 1)[-1]):
                return f"are of another form ({name[:100]!r} is not like the weights it is named after)"
        if sum(form.nbytes for form in found.values()) > 64 * sum(form.nbytes for form in weights.values()):
            return "are more than 64 models"
        return None

    return check
