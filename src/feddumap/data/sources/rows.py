"""From rows of samples, as every reader of a user's data gives them, to the contents of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from feddumap.config import DataConfig
from feddumap.core.rng import stream
from feddumap.data.dataset import Arrays, Contents, Labels
from feddumap.data.sources.inputs import Stored, Where, spec_of
from feddumap.errors import FeddumapError

TEST_FRACTION = 0.2

Values = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples of one file or folder: labels are integers or strings; users, if known, as well, with None, ""
    or a negative number for nobody. `where` names a row in errors, `origin` the file."""

    stored: Stored
    labels: Values
    users: Values | None
    origin: str
    where: Where
    classes: tuple[str, ...] | None = None

    def __getitem__(self, index: npt.NDArray[np.int64]) -> Rows:
        users = None if self.users is None else self.users[index]
        stored = self.stored._replace(inputs=self.stored.inputs[index])
        return replace(self, stored=stored, labels=self.labels[index], users=users, where=self._at(index))

    def _at(self, index: npt.NDArray[np.int64]) -> Where:
        return lambda row: self.where(int(index[row]))


def contents(train: Rows, test: Rows | None, data: DataConfig, source: str, shuffle: bool = True) -> Contents:
    """A data set of a training part and a test part, which is drawn from the former if there is none.

    `shuffle` brings the training part into a random order, the same in every run: the server's samples are
    drawn from its last fifth, and many data sets are sorted by label.
    """
    parts = [train] if test is None else [train, test]
    for part in parts:
        _check_lengths(part)
    given = spec_of([part.stored for part in parts], [part.where for part in parts], data.vocabulary)
    classes = _class_names(parts)
    labelled = [replace(part, labels=_numbered(part, classes)) for part in parts]
    if test is None:
        labelled = _drawn(labelled[0], data.test_fraction or TEST_FRACTION, shuffle)
    elif shuffle:
        order = stream(0, "data", "order").permutation(len(labelled[0].labels))
        labelled[0] = labelled[0][order]
    one, other = labelled
    _check_every_class(one.labels, classes, one.origin, drawn=test is None)
    users, numbers = _number_users([part.users for part in labelled])
    if numbers[0] is None and numbers[1] is not None:
        raise FeddumapError(
            f"{other.origin} says whose its samples are, {one.origin} does not: expected users in the "
            "training part too"
        )
    arrays = Arrays(one.stored.inputs, one.labels, other.stored.inputs, other.labels, *numbers)
    return Contents(arrays, classes, source, given, users)


def _check_lengths(part: Rows) -> None:
    count = len(part.stored.inputs)
    for values, what in ((part.labels, "labels"), (part.users, "users")):
        if values is not None and len(values) != count:
            raise FeddumapError(
                f"{part.origin} has {count} inputs and {len(values)} {what}: expected equal numbers"
            )


def _class_names(parts: Sequence[Rows]) -> tuple[str, ...]:
    """The given names, or the sorted labels, or the numbers up to the largest label."""
    origin = parts[0].origin
    given = next((part.classes for part in parts if part.classes is not None), None)
    if len({part.labels.dtype.kind in "iu" for part in parts}) > 1:
        raise FeddumapError(f"{parts[-1].origin} has labels of another type than {origin}: expected the same")
    if given is not None:
        names = given
    elif parts[0].labels.dtype.kind in "iu":
        top = [(int(part.labels.max()), part) for part in parts]
        largest, owner = max(top, key=lambda pair: pair[0])
        samples = len(parts[0].labels)
        if largest >= samples:
            row = int(owner.labels.argmax())
            raise FeddumapError(
                f"{owner.where(row)} has the label {largest} but there are only {samples} training samples: "
                "number the classes from 0"
            )
        names = tuple(map(str, range(largest + 1)))
    else:
        names = tuple(sorted({str(label) for part in parts for label in part.labels.tolist()}))
    if len(names) < 2:
        raise FeddumapError(f"{origin} has {len(names)} class, expected two or more")
    return names


def _numbered(part: Rows, classes: tuple[str, ...]) -> Labels:
    return number_labels(part.labels, classes, part.where)


def number_labels(labels: Values, classes: Sequence[str], where: Where) -> Labels:
    """Labels as numbers from 0: integers are checked, names looked up among `classes`."""
    count = len(classes)
    if labels.dtype.kind in "iu":
        wrong = (labels < 0) | (labels >= count)
        made = labels.astype(np.int64)
    else:
        number = {name: label for label, name in enumerate(classes)}
        made = np.array([number.get(str(label), -1) for label in labels.tolist()], np.int64)
        wrong = made < 0
    if wrong.any():
        row = int(wrong.argmax())
        known = f"0 to {count - 1}" if labels.dtype.kind in "iu" else f"one of {_some(classes)}"
        raise FeddumapError(f"{where(row)} has the label {labels[row]}: expected {known}")
    return made


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _drawn(rows: Rows, fraction: float, shuffle: bool) -> list[Rows]:
    """Training and test part: a random share of the rows, the same in every run."""
    count = len(rows.labels)
    if count < 2:
        raise FeddumapError(f"{rows.origin} has {count} sample: expected two or more")
    size = min(max(1, round(fraction * count)), count - 1)
    order = stream(0, "data", "test").permutation(count)
    rest = order[size:]
    return [rows[rest if shuffle else np.sort(rest)], rows[np.sort(order[:size])]]


def _check_every_class(labels: Labels, classes: Sequence[str], origin: str, drawn: bool) -> None:
    missing = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)
    if len(missing):
        advice = (
            "give data.test, or lower data.test_fraction" if drawn else "add some, or leave the class out"
        )
        raise FeddumapError(
            f"{origin} has no training sample of the class {classes[int(missing[0])]}: {advice}"
        )


def _number_users(
    parts: Sequence[Values | None],
) -> tuple[tuple[str, ...], list[Labels | None]]:
    """The sorted names of all users, and each part's users as indices of them, −1 for nobody."""
    known = {user for part in parts if part is not None for user in part.tolist() if not _nobody(user)}
    names = sorted(known, key=lambda user: (isinstance(user, str), user))
    number = {user: index for index, user in enumerate(names)}
    numbers = [
        None if part is None else np.array([number.get(user, -1) for user in part.tolist()], np.int64)
        for part in parts
    ]
    return tuple(map(str, names)), numbers


def _nobody(user: Any) -> bool:
    return user is None or user == "" or (isinstance(user, Integral) and int(user) < 0)
