"""A data set: its arrays, what describes them and what makes them valid. `data/cache.py` stores it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feddumap.core.messages import CIFAR_INPUT, InputSpec

Inputs = npt.NDArray[Any]
Labels = npt.NDArray[np.int64]


class Arrays(NamedTuple):
    """The arrays of a set: inputs [N, …] as `InputSpec` stores them, labels [N] and, if the data set says
    whose each sample is, users [N] as indices of `Contents.users` (−1: nobody's). The field names are the
    cache's file names."""

    train_inputs: Inputs
    train_labels: Labels
    test_inputs: Inputs
    test_labels: Labels
    train_users: Labels | None = None
    test_users: Labels | None = None


@dataclass(frozen=True, eq=False)
class Contents:
    """What a reader of a data set returns; `source` names the origin."""

    arrays: Arrays
    classes: tuple[str, ...]
    source: str
    input: InputSpec = CIFAR_INPUT
    users: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and labels, read-only and memory-mapped from the cache. `input` describes a sample, `source`
    names the origin; with `users`, `train_users` (and `test_users`) say whose each sample is. `owner` is kept
    alive, as the files are removed with it."""

    name: str
    classes: tuple[str, ...]
    train_inputs: Inputs
    train_labels: Labels
    test_inputs: Inputs
    test_labels: Labels
    train_users: Labels | None
    test_users: Labels | None
    source: str
    input: InputSpec = CIFAR_INPUT
    users: tuple[str, ...] = ()
    owner: object = None

    @property
    def folder(self) -> Path:
        """The cache folder that the arrays are mapped from."""
        assert isinstance(self.train_inputs, np.memmap)
        return Path(str(self.train_inputs.filename)).parent


def find_problem(contents: Contents) -> str | None:
    """Why the arrays are not a valid set, or None.

    >>> images, labels = np.zeros((2, 32, 32, 3), np.uint8), np.array([0, 7])
    >>> find_problem(Contents(Arrays(images, labels, images, labels), ("a", "b"), "here"))
    'has train_labels from 0 to 7, expected 0 to 1'
    """
    arrays, given, classes = contents.arrays, contents.input, len(contents.classes)
    for split in ("train", "test"):
        inputs, labels = getattr(arrays, f"{split}_inputs"), getattr(arrays, f"{split}_labels")
        if inputs.dtype != given.dtype or inputs.shape[1:] != given.stored_shape:
            expected = f"{given.dtype} (N, {', '.join(map(str, given.stored_shape))})"
            return f"has {split}_inputs {inputs.dtype} {inputs.shape}, expected {expected}"
        if labels.dtype != np.int64 or labels.shape != inputs.shape[:1] or not len(labels):
            expected = f"int64 ({max(len(inputs), 1)},)"
            return f"has {split}_labels {labels.dtype} {labels.shape}, expected {expected}"
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            return f"has {split}_labels from {low} to {high}, expected 0 to {classes - 1}"
        users = getattr(arrays, f"{split}_users")
        if users is not None and (users.dtype != np.int64 or users.shape != labels.shape):
            return f"has {split}_users {users.dtype} {users.shape}, expected int64 ({len(labels)},)"
        if users is not None and (users.min() < -1 or users.max() >= len(contents.users)):
            return (
                f"has {split}_users from {users.min()} to {users.max()}, expected -1 to "
                f"{len(contents.users) - 1}"
            )
    return None
