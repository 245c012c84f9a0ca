"""Reads a user's .npz file: arrays of a training and a test part."""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile

from feddumap.config import DataConfig
from feddumap.data.cache import ARRAY_ERRORS
from feddumap.data.dataset import Contents
from feddumap.data.sources.array_rows import array_rows
from feddumap.data.sources.memory import require_memory
from feddumap.data.sources.rows import Rows, contents
from feddumap.errors import FeddumapError, show

REQUIRED = ("train_inputs", "train_labels", "test_inputs", "test_labels")
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
OTHER_ERRORS = (struct.error, IndexError, lzma.LZMAError)
OTHERS = ("classes", "train_users", "test_users")
MOST_NAMES = 8  # of arrays in an error
OLDER = {"train_inputs": "train_images", "test_inputs": "test_images", "inputs": "images"}
"""Names of earlier versions, still accepted."""


def from_npz(path: Path, data: DataConfig) -> Contents:
    """The data set of a file, in its order. Without test arrays, and with `data.test_fraction`, a share of
    the rows is the test part."""
    drawn = data.test_fraction is not None
    found = arrays(path, REQUIRED[:2] if drawn else REQUIRED, (*REQUIRED[2:], *OTHERS))
    if drawn and "test_inputs" in found:
        raise FeddumapError(
            f"data.test_fraction = {data.test_fraction}: {path} has a test part of its own; remove the key"
        )

    def rows(part: str) -> Rows:
        return array_rows(
            found[f"{part}_inputs"],
            found[f"{part}_labels"],
            found.get(f"{part}_users"),
            found.get("classes"),
            data.kind,
            str(path),
            part,
        )

    train, test = rows("train"), None if drawn else rows("test")
    return contents(train, test, data, f"the file {path}", shuffle=False)


def arrays(path: Path, wanted: Sequence[str], also: Sequence[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """Arrays of an .npz file: all of `wanted`, and those of `also` that exist. What they declare is checked
    before any is decompressed."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, NpzFile):
                raise FeddumapError(f"{path} holds a single array: save named arrays with numpy.savez")
            names = {name: _stored_name(name, archive.files) for name in (*wanted, *also)}
            chosen = {name: stored for name, stored in names.items() if stored is not None}
            assert archive.zip is not None
            total = sum(_declared(archive.zip, stored) for stored in chosen.values())
            require_memory(total, str(path), path.stat().st_size, "save it with numpy.savez if it is sound")
            found = {name: archive[stored] for name, stored in chosen.items()}
            present = ", ".join(map(show, archive.files[:MOST_NAMES])) or "no arrays"
    except OSError as error:
        raise FeddumapError(f"cannot read the data set {path}: {error.strerror or error}") from None
    except (
        *ARRAY_ERRORS,
        RuntimeError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
        *OTHER_ERRORS,
    ) as error:
        # zipfile raises RuntimeError for encrypted members and NotImplementedError for unknown compression
        shown = str(error).replace("\n", " ")
        raise FeddumapError(
            f"{path} is not a readable .npz file ({shown}): save plain arrays with numpy.savez"
        ) from None
    if missing := [name for name in wanted if name not in found]:
        expected = "" if len(missing) == len(wanted) else f"expected {', '.join(wanted)}, but "
        raise FeddumapError(f"{path} lacks {', '.join(missing)}: {expected}it has {present}")
    return found


def _declared(archive: zipfile.ZipFile, stored: str) -> int:
    """Bytes of an array, as its header and the archive's directory declare them; they must agree."""
    member = stored if stored in archive.namelist() else f"{stored}.npy"
    with archive.open(member) as file:
        version = npy.read_magic(file)
        if version not in READERS:
            raise ValueError(f"{member} is of the format {version}")
        shape, _, dtype = READERS[version](file)
        header = file.tell()
    count = 1
    for side in shape:
        if type(side) is not int or side < 0:
            raise ValueError(f"{member} has the shape {show(shape)}")
        count *= side
    size = archive.getinfo(member).file_size
    if not dtype.hasobject and count * dtype.itemsize != size - header:
        raise ValueError(f"{member} declares {dtype} {show(shape)} in {size - header} bytes")
    return size


def _stored_name(name: str, files: Sequence[str]) -> str | None:
    return next((each for each in (name, OLDER.get(name)) if each in files), None)
