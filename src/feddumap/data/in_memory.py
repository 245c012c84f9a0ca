"""Data sets made in Python from arrays, tensors or `torch.utils.data.Dataset`.

They are written as a cached set is, into a folder in shared memory, so that worker processes map them.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from feddumap.config import DataConfig
from feddumap.core.messages import Kind
from feddumap.data import cache
from feddumap.data.dataset import Arrays, Contents, Dataset
from feddumap.data.shared_folder import make_folder, remove_folder
from feddumap.data.sources.array_rows import array_rows
from feddumap.data.sources.inputs import adjusted
from feddumap.data.sources.rows import Rows, contents
from feddumap.errors import FeddumapError

PREFIX = "python:"
Array = npt.NDArray[Any]

_OPEN: weakref.WeakValueDictionary[str, InMemoryDataset] = weakref.WeakValueDictionary()


class InMemoryDataset:
    """A data set from Python objects; exported as `feddumap.Dataset`.

    `train` and `test` are pairs (inputs, labels) of arrays or tensors, or a `torch.utils.data.Dataset` or
    sequence of (input, label) pairs. Bytes [N, h, w], [N, h, w, c] or [N, c, h, w] are images, floats are
    numbers of any shape, other integers [N, length] are tokens; `kind` says otherwise. Without `test`, a
    fifth of the samples is drawn. `users` and `test_users` say whose each sample is (a string or a number;
    None, "" or a negative number: nobody's). `name` is shown in tables.

    >>> made = InMemoryDataset(train=(np.eye(4), [0, 1, 0, 1]), test=(np.eye(4), [0, 1, 0, 1]))
    >>> made.open().input.describe(), made.config_name == "python:" + made.digest[:16]
    ('numbers 4', True)
    """

    def __init__(
        self,
        train: Any,
        test: Any = None,
        users: Any = None,
        test_users: Any = None,
        classes: Sequence[str] | None = None,
        kind: Kind | None = None,
        flip: bool | None = None,
        crop: int | None = None,
        name: str = "python",
    ) -> None:
        if test is None and test_users is not None:
            raise FeddumapError("test_users are given without test: give both, or neither")
        names = None if classes is None else np.array([str(each) for each in classes])
        parts = [
            _rows(given, owners, names, kind, part)
            for part, given, owners in (("train", train, users), ("test", test, test_users))
            if given is not None
        ]
        settings = DataConfig(flip=flip, crop=crop)
        made = contents(parts[0], parts[1] if len(parts) > 1 else None, settings, "Python objects")
        made = replace(made, input=adjusted(made.input, settings))
        self.name = name
        self.digest = content_digest(made)
        self._folder, lock = make_folder(sum(array.nbytes for array in made.arrays if array is not None))
        weakref.finalize(self, remove_folder, self._folder, lock, os.getpid())
        cache.write(self._folder / "set", name, made)
        _OPEN[self.config_name] = self

    @property
    def config_name(self) -> str:
        """`data.name` of a run on this data set."""
        return f"{PREFIX}{self.digest[:16]}"

    @property
    def folder(self) -> Path:
        """The folder of the arrays, removed when this object is collected or the process exits."""
        return self._folder / "set"

    def open(self) -> Dataset:
        """The arrays, memory-mapped."""
        return cache.read(self.folder, verify=False, owner=self)

    def contents(self) -> Contents:
        """The arrays and their description, as a reader returns them."""
        found = self.open()
        arrays = Arrays(*(getattr(found, field) for field in Arrays._fields))
        return Contents(arrays, found.classes, found.source, found.input, found.users)


def find(name: str) -> InMemoryDataset:
    """The data set of this process with a `data.name` of the form python:DIGEST."""
    found = _OPEN.get(name)
    if found is None:
        raise FeddumapError(
            f"data.name = {name!r} is a data set that was made in Python and is not in this process: pass "
            "the data again, as in feddumap.Run(data=..., out=...)"
        )
    return found


def content_digest(made: Contents) -> str:
    """SHA-256 of the arrays, their description, the classes and the users."""
    total = hashlib.sha256(
        json.dumps([made.input.to_json(), made.classes, made.users], ensure_ascii=True).encode()
    )
    for field, array in made.arrays._asdict().items():
        if array is not None:
            total.update(f"{field} {array.dtype} {array.shape}".encode())
            total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def _rows(given: Any, users: Any, classes: Array | None, kind: Kind | None, part: str) -> Rows:
    inputs, labels = given if isinstance(given, tuple) and len(given) == 2 else _pairs(given, part)
    x, y = _array(inputs, f"{part}_inputs"), _array(labels, f"{part}_labels")
    return array_rows(x, y, None if users is None else _users(users), classes, kind, "data", part)


def _pairs(given: Any, part: str) -> tuple[Array, Array]:
    """The inputs and labels of a `torch.utils.data.Dataset` or sequence of pairs."""
    if not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
        raise FeddumapError(
            f"{part} is a {type(given).__name__}: expected (inputs, labels), or a sequence of such pairs"
        )
    inputs: list[Array] = []
    labels: list[Any] = []
    for row in range(len(given)):
        pair = given[row]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise FeddumapError(
                f"data: row {row} of {part} is a {type(pair).__name__}: expected (input, label)"
            )
        value = _array(pair[0], f"row {row} of {part}")
        if inputs and (value.shape, value.dtype) != (inputs[0].shape, inputs[0].dtype):
            raise FeddumapError(
                f"data: row {row} of {part} is {value.dtype} {value.shape}, row 0 is {inputs[0].dtype} "
                f"{inputs[0].shape}: expected the same"
            )
        inputs.append(value)
        labels.append(pair[1].item() if isinstance(pair[1], torch.Tensor) else pair[1])
    if not inputs:
        raise FeddumapError(f"data: {part} is empty: expected samples")
    return np.stack(inputs), _array(labels, f"{part}_labels")


def _array(value: Any, what: str) -> Array:
    if isinstance(value, torch.Tensor):
        return np.asarray(value.detach().cpu().numpy())
    try:
        made = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise FeddumapError(f"data: {what} is not an array ({error}): expected equal shapes") from None
    if made.dtype == object:
        raise FeddumapError(f"data: {what} is an array of objects: expected numbers or strings")
    return made


def _users(value: Any) -> Array:
    if isinstance(value, torch.Tensor | np.ndarray):
        return np.asarray(value)
    made = np.empty(len(value), object)
    made[:] = list(value)
    return made
