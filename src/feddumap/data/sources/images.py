"""Decodes images: all to one size and to one number of channels."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from feddumap.data.dataset import Inputs
from feddumap.data.sources.formats import IMAGE_ERRORS
from feddumap.data.sources.memory import require_memory
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Say

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
GREY, DEEP = ("1", "L", "LA"), ("I", "F")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}

MOST_CHANNELS = 4
SAY_EVERY = 50_000  # images

Size = tuple[int, int]


class Picture(NamedTuple):
    """An encoded image, and its name in errors."""

    where: str
    source: Path | bytes

    @property
    def nbytes(self) -> int:
        """Its encoded size."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size


def side_lengths(size: int | list[int] | None) -> Size | None:
    """`data.size` as (height, width)."""
    if size is None:
        return None
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def decode(
    pictures: Sequence[Picture], size: Size | None, say: Say, origin: str, channels: int | None = None
) -> Inputs:
    """Images uint8 [N, h, w, c]. Without `size` (height, width) they must be of equal size; without
    `channels` they are grey (c = 1) if all of them are, else RGB."""
    found = [_header(picture) for picture in pictures]
    resize = size is not None
    if size is None:
        size = found[0][0]
        for picture, (other, _) in zip(pictures, found, strict=True):
            if other != size:
                raise FeddumapError(
                    f"{picture.where} is {_pixels(other)}, {pictures[0].where} is {_pixels(size)}: expected "
                    "images of one size; set data.size to resize them"
                )
    count = channels or (1 if all(mode in GREY for _, mode in found) else 3)
    stored = None if resize else sum(picture.nbytes for picture in pictures)  # a size that was asked for
    require_memory(len(pictures) * size[0] * size[1] * count, origin, stored)
    made = np.empty((len(pictures), *size, count), np.uint8)
    for row, picture in enumerate(pictures):
        if row and row % SAY_EVERY == 0:
            say(f"{origin}: decoded {row:,} of {len(pictures):,} images")
        with _opened(picture) as image:
            plain = image.convert(MODES[count])
            fitting = plain if found[row][0] == size else plain.resize((size[1], size[0]))
            made[row] = np.asarray(fitting).reshape(*size, count)
    if resized := sum(old != size for old, _ in found):
        say(f"{origin}: {resized} of {len(pictures)} images were resized to {_pixels(size)}")
    return made


def _header(picture: Picture) -> tuple[Size, str]:
    with _opened(picture) as image:
        size, mode = (image.size[1], image.size[0]), str(image.mode)
        require_memory(
            size[0] * size[1] * MOST_CHANNELS, picture.where, picture.nbytes, "replace or remove it"
        )
    if mode.startswith(DEEP):
        raise FeddumapError(f"{picture.where} has more than 8 bits per pixel: expected 8")
    return size, mode


@contextmanager
def _opened(picture: Picture) -> Iterator[Image]:
    from PIL import Image

    source: Any = io.BytesIO(picture.source) if isinstance(picture.source, bytes) else picture.source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", Image.DecompressionBombWarning
            )  # `_header` has a limit of its own
            opened = Image.open(source, formats=FORMATS)
        with opened as image:
            yield image
    except (*IMAGE_ERRORS, Image.DecompressionBombError) as error:
        shown = str(error).replace("\n", " ")
        if isinstance(picture.source, bytes):
            shown = "it is not a PNG, JPEG or WebP image" if "cannot identify" in shown else shown
        raise FeddumapError(f"{picture.where} cannot be decoded ({shown}): replace or remove it") from None


def _pixels(size: Size) -> str:
    return f"{size[1]} by {size[0]} pixels"
