"""A device's own data: a folder of images, a table or an .npz file. Nothing is cached or copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddumap.config import DataConfig
from feddumap.core.messages import InputSpec
from feddumap.data.dataset import Inputs, Labels
from feddumap.data.sources import folder, npz, tables
from feddumap.data.sources.array_rows import array_rows
from feddumap.data.sources.rows import Rows, number_labels
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Say, ignore

IMAGE_COLUMNS = ("img", "image")


def read(
    path: Path,
    classes: Sequence[str],
    given: InputSpec,
    say: Say = ignore,
    columns: DataConfig | None = None,
) -> tuple[Inputs, Labels]:
    """Inputs [n, …] in the form `given` and labels [n]; `classes` are the class names in the order of the
    labels.

    A folder has a sub-folder of PNG or JPEG images per class, named after the class. A .parquet or .csv file
    has the columns that `columns` (the federation's [data]) names, by default `label` and, for images,
    `image` or `img`. An .npz file has the arrays `inputs` and `labels`. Labels are class numbers or names.
    """
    if path.is_dir():
        found = _from_folder(path, classes, given, say)
    elif path.suffix in tables.ENDINGS:
        found = _from_table(path, given, say, columns or DataConfig())
    elif path.suffix == ".npz":
        arrays = npz.arrays(path, ("inputs", "labels"))
        found = array_rows(arrays["inputs"], arrays["labels"], None, None, given.kind, str(path), "device")
    else:
        state = "is neither of these" if path.exists() else "no such file or folder"
        raise FeddumapError(
            f"cannot read the device's data {path}: {state}; expected a folder with a sub-folder of images "
            "per class, or a .parquet, .csv or .npz file"
        )
    return _checked(found, path, classes, given)


def _checked(found: Rows, path: Path, classes: Sequence[str], given: InputSpec) -> tuple[Inputs, Labels]:
    inputs, labels = found.stored.inputs, found.labels
    if len(inputs) != len(labels):
        raise FeddumapError(
            f"{path} has {len(inputs)} inputs and {len(labels)} labels: expected equal numbers"
        )
    if (found.stored.kind, inputs.shape[1:]) != (given.kind, given.stored_shape):
        raise FeddumapError(
            f"{path} has inputs {inputs.dtype} {inputs.shape[1:]}: expected {given.dtype} "
            f"{given.stored_shape}, as the federation's input is {given.describe()}"
        )
    if given.kind == "tokens" and inputs.max() >= given.vocabulary:
        row = int(inputs.max(axis=1).argmax())
        raise FeddumapError(
            f"{found.where(row)} has the token {inputs[row].max()}: expected 0 to {given.vocabulary - 1}, "
            "the federation's vocabulary"
        )
    return np.ascontiguousarray(inputs), number_labels(labels, classes, found.where)


def _from_folder(path: Path, classes: Sequence[str], given: InputSpec, say: Say) -> Rows:
    if given.kind != "image":
        raise FeddumapError(
            f"{path} is a folder of images, but the federation's input is {given.describe()}: expected a "
            ".parquet, .csv or .npz file"
        )
    known = set(classes)
    files = folder.list_images(path, lambda name: _check_class(path, name, known, classes))
    channels, height, width = given.shape
    stored = folder.read_images(files, (height, width), channels, say, str(path))
    labels = np.array([label for _, label in files])
    return Rows(stored, labels, None, str(path), lambda row: str(files[row][0]))


def _check_class(path: Path, name: str, known: set[str], classes: Sequence[str]) -> None:
    if name not in known:
        raise FeddumapError(
            f"{path} has a folder {name!r}, which is not a class of the federation: expected some of "
            f"{', '.join(classes)}"
        )


def _from_table(path: Path, given: InputSpec, say: Say, columns: DataConfig) -> Rows:
    """From the columns of the federation's own table, if it has one."""
    data = DataConfig(kind=given.kind, input=columns.input, label=columns.label)
    table, stored = tables.read_table(path, data), path.stat().st_size
    if given.kind == "image":
        image = next((name for name in IMAGE_COLUMNS if name in table.column_names), None)
        changes = {"size": list(given.shape[1:]), "input": columns.input or image}
        data, channels = data.model_copy(update=changes), given.shape[0]
        return tables.rows(table, data, str(path), say, channels=channels, stored=stored)
    inputs = tables.needed(table.column_names, data, str(path))[:-1]
    if given.kind == "tokens" and len(inputs) == 1:
        data = data.model_copy(update={"length": given.shape[0]})
    return tables.rows(table, data, str(path), say, stored=stored)
