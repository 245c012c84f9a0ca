"""Rows of a data set from arrays of inputs, labels and users."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from feddumap.core.messages import Kind
from feddumap.data.sources.inputs import to_stored
from feddumap.data.sources.rows import Rows
from feddumap.errors import FeddumapError

Array = npt.NDArray[Any]


def array_rows(
    inputs: Array,
    labels: Array,
    users: Array | None,
    classes: Array | None,
    kind: Kind | None,
    origin: str,
    part: str,
) -> Rows:
    """The rows of one part (train or test); in errors, rows are counted from 0 as in Python."""

    def where(row: int) -> str:
        return f"{origin}: row {row} of {part}_inputs"

    def label_where(row: int) -> str:
        return f"{origin}: row {row} of the {part} part"

    stored = to_stored(inputs, kind, f"{origin}: {part}_inputs", where)
    return Rows(
        stored,
        to_labels(labels, f"{origin}: {part}_labels"),
        None if users is None else to_users(users, f"{origin}: {part}_users"),
        f"{origin}: the {part} part",
        label_where,
        None if classes is None else to_classes(classes, origin),
    )


def to_labels(array: Array, origin: str) -> Array:
    """Labels are integers or strings, one per sample."""
    if array.dtype.kind not in "iuU" or array.ndim != 1 or not len(array):
        raise FeddumapError(f"{origin} is {array.dtype} {array.shape}: expected integers or strings (N,)")
    return array


def to_users(array: Array, origin: str) -> Array:
    """Users are strings or integers, one per sample, or None."""
    if array.dtype.kind not in "iuUO" or array.ndim != 1:
        raise FeddumapError(f"{origin} is {array.dtype} {array.shape}: expected strings or integers (N,)")
    for row, user in enumerate(array.tolist()):
        if user is not None and not isinstance(user, str | Integral):
            raise FeddumapError(f"{origin}: row {row} is {user!r}: expected a string, an integer or None")
    return array


def to_classes(array: Array, origin: str) -> tuple[str, ...]:
    """The names of the classes, in the order of the labels."""
    if array.dtype.kind != "U" or array.ndim != 1 or len(np.unique(array)) != len(array):
        raise FeddumapError(f"{origin}: classes is not a unicode array of distinct names")
    return tuple(array.tolist())
