"""Reads a folder of class folders with PNG or JPEG images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from feddumap.config import DataConfig
from feddumap.data.dataset import Contents
from feddumap.data.sources.images import Picture, Size, decode, side_lengths
from feddumap.data.sources.inputs import Stored
from feddumap.data.sources.rows import Rows, contents
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Say

ENDINGS = {".png", ".jpg", ".jpeg"}


def from_folder(path: Path, data: DataConfig, say: Say) -> Contents:
    """The data set of a folder: `train` and `test` with a folder per class each, or a folder per class."""
    if data.kind not in (None, "image"):
        raise FeddumapError(f"data.kind = {data.kind!r}: {path} is a folder of images; expected image")
    size = side_lengths(data.size)
    train, test = path, Path(data.test).expanduser() if data.test is not None else None
    if (path / "train").is_dir() and (path / "test").is_dir() and not _pictures(path / "train"):
        if test is not None or data.test_fraction is not None:
            raise FeddumapError(f"{path} has a test part of its own: remove data.test and data.test_fraction")
        train, test = path / "train", path / "test"
    parts = [(place, list_images(place)) for place in (train, test) if place is not None]
    pictures = [Picture(str(file), file) for _, files in parts for file, _ in files]
    images = decode(pictures, size, say, str(path))  # together, so that all have equal channels
    names = [file.where for file in pictures]
    made, start = [], 0
    for place, files in parts:
        stop = start + len(files)
        labels = np.array([label for _, label in files])
        where = _named(names[start:stop])
        made.append(Rows(Stored("image", images[start:stop]), labels, None, str(place), where))
        start = stop
    return contents(made[0], made[1] if len(made) > 1 else None, data, f"the folder {path}")


def _named(names: list[str]) -> Callable[[int], str]:
    return lambda row: names[row]


def list_images(path: Path, check: Callable[[str], None] = lambda _: None) -> list[tuple[Path, str]]:
    """The images of a folder of class folders, each with the name of its class, which `check` may refuse."""
    if not path.is_dir():
        raise FeddumapError(f"{path} is not a folder: expected a sub-folder of PNG or JPEG images per class")
    try:
        folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and entry.name[0] != ".")
        for folder in folders:
            check(folder.name)
        found = [(file, folder.name) for folder in folders for file in _pictures(folder)]
    except OSError as error:
        raise FeddumapError(f"cannot read {error.filename}: {error.strerror}") from None
    if not found:
        raise FeddumapError(f"{path} has no images: expected a sub-folder of PNG or JPEG images per class")
    return found


def _pictures(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in ENDINGS and file.is_file())


def read_images(files: list[tuple[Path, str]], size: Size, channels: int, say: Say, origin: str) -> Stored:
    """Images in a given form."""
    pictures = [Picture(str(file), file) for file, _ in files]
    return Stored("image", decode(pictures, size, say, origin, channels))
