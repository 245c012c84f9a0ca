"""Random crops and horizontal flips of images as bytes.

The C kernels crop while reading. For torch, a whole epoch is cropped at once: all possible crops of an image
are strided windows of the same memory, so one indexing operation copies the chosen ones.
"""

from __future__ import annotations

import numpy as np

Crops = np.ndarray
"""int32 [n, 3]: for each image the row and column of the original where its crop starts (black outside), and
whether the crop is mirrored."""


def draw(count: int, rng: np.random.Generator, border: int, *, flip: bool) -> Crops:
    """Random crops that start up to `border` pixels off and, with `flip`, are mirrored with probability
    1/2."""
    top, left = rng.integers(0, 2 * border + 1, size=(2, count))
    mirror = (rng.random(count) < 0.5) & flip
    return np.stack([top - border, left - border, mirror], axis=1).astype(np.int32)


def pad(images: np.ndarray, border: int) -> np.ndarray:
    """Images [n, h, w, c] with a black border of `border` pixels, and their mirror images: [2, n, …]."""
    bordered = np.pad(images, ((0, 0), (border, border), (border, border), (0, 0)))
    return np.stack([bordered, bordered[:, :, ::-1]])


def crop_and_flip(padded: np.ndarray, order: np.ndarray, crops: Crops, border: int) -> np.ndarray:
    """The images `order` of a set padded by `border` pixels, cropped and mirrored by `crops`."""
    _, count, high, wide, channels = padded.shape
    height, width = high - 2 * border, wide - 2 * border
    top, left, mirror = crops[:, 0] + border, crops[:, 1] + border, crops[:, 2]
    left = np.where(mirror, 2 * border - left, left)  # the same pixels in the mirror image
    side, image, row, column, _ = padded.strides
    windows = np.lib.stride_tricks.as_strided(
        padded,
        (2, count, 2 * border + 1, 2 * border + 1, height, width * channels),
        (side, image, row, column, row, 1),
        writeable=False,
    )
    chosen: np.ndarray = windows[mirror, order, top, left]
    return chosen.reshape(len(order), height, width, channels)
