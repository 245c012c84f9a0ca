"""A device's own data: a folder of images, a Parquet file or an .npz file. Nothing is cached or copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddumap.data.dataset import Images, Labels
from feddumap.data.sources.formats import (
    IMAGE_ERRORS,
    decode_image,
    npz_arrays,
    read_batches,
    to_images,
    to_labels,
)
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Say, ignore

SIDE = 32
ENDINGS = {".png", ".jpg", ".jpeg"}


def read(path: Path, classes: Sequence[str], say: Say = ignore) -> tuple[Images, Labels]:
    """Images uint8 [n, 32, 32, 3] and labels [n]; `classes` are the class names in the order of the labels.

    A folder has a sub-folder of PNG or JPEG images per class, named after the class. A Parquet file has the
    columns `image` (or `img`) and `label`, an .npz file the arrays `images` and `labels`, with labels as
    class indices.
    """
    if path.is_dir():
        images, labels = _from_folder(path, classes, say)
    elif path.suffix == ".parquet":
        images, labels = _from_parquet(path)
    elif path.suffix == ".npz":
        images, labels = _from_npz(path)
    else:
        found = "no such file or folder" if not path.exists() else "unsupported format"
        raise FeddumapError(
            f"data {str(path)!r}: {found}; expected a folder with a sub-folder of images per class, a "
            ".parquet file or an .npz file"
        )
    if labels.min() < 0 or labels.max() >= len(classes):
        raise FeddumapError(
            f"{path} has labels from {labels.min()} to {labels.max()}: expected 0 to {len(classes) - 1}, the "
            "classes of the federation"
        )
    return images, labels


def _from_folder(path: Path, classes: Sequence[str], say: Say) -> tuple[Images, Labels]:
    number = {name: label for label, name in enumerate(classes)}
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if strange := next((folder.name for folder in folders if folder.name not in number), None):
        raise FeddumapError(
            f"{path} has a folder {strange!r}, which is not a class of the federation: expected some of "
            f"{', '.join(classes)}"
        )
    files = [
        (file, number[folder.name])
        for folder in folders
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in ENDINGS
    ]
    if not files:
        raise FeddumapError(
            f"{path} has no images: expected a sub-folder of PNG or JPEG images per class, of "
            f"{', '.join(classes)}"
        )
    images = np.empty((len(files), SIDE, SIDE, 3), np.uint8)
    sizes = [_read_image(file, images[i]) for i, (file, _) in enumerate(files)]
    if other := sum(size != (SIDE, SIDE) for size in sizes):
        say(f"{path}: {other} of {len(files)} images were resized to {SIDE} by {SIDE} pixels")
    return images, np.array([label for _, label in files], np.int64)


def _read_image(file: Path, into: Images) -> tuple[int, int]:
    """Read an image into `into`, resized if necessary; returns its original size."""
    from PIL import Image

    try:
        with Image.open(file, formats=("PNG", "JPEG")) as picture:
            size = picture.size
            plain = picture.convert("RGB")
            into[:] = np.asarray(plain if size == (SIDE, SIDE) else plain.resize((SIDE, SIDE)))
    except (*IMAGE_ERRORS, Image.DecompressionBombError) as error:
        raise FeddumapError(f"{file} cannot be decoded ({error}): replace or remove it") from None
    return size


def _from_parquet(path: Path) -> tuple[Images, Labels]:
    images: list[Images] = []
    labels: list[Labels] = []
    for pictures, numbers in read_batches(path, "label"):
        images += [decode_image(raw, f"{path}: image {len(images) + i}") for i, raw in enumerate(pictures)]
        labels.append(numbers)
    if not images:
        raise FeddumapError(f"{path} has no rows: expected an image and a label per row")
    return np.stack(images), np.concatenate(labels)


def _from_npz(path: Path) -> tuple[Images, Labels]:
    try:
        with path.open("rb") as file:
            found = npz_arrays(file, path, ("images", "labels"))
    except OSError as error:
        raise FeddumapError(f"cannot read {path}: {error.strerror}") from None
    images = to_images(found["images"], f"{path}: images")
    labels = to_labels(found["labels"], f"{path}: labels")
    if len(images) != len(labels):
        raise FeddumapError(
            f"{path} has {len(images)} images and {len(labels)} labels: expected equal numbers"
        )
    return np.ascontiguousarray(images), labels
