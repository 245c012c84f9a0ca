"""Cropping and flipping, on bytes.

The kernels crop where they read. For torch, a whole epoch is cropped at once: all places where an image can
be cropped are windows of the same memory, so that one look-up copies the chosen ones, row by row.
"""

from __future__ import annotations

import numpy as np

PAD = 4

Crops = np.ndarray
"""For each image the row and the column of the original that its crop begins at (−4 … 4; black outside) and
whether the crop is mirrored: int32 [n, 3]."""


def draw(count: int, rng: np.random.Generator) -> Crops:
    """Random places, mirrored half of the time."""
    top, left = rng.integers(0, 2 * PAD + 1, size=(2, count))
    mirror = rng.random(count) < 0.5
    return np.stack([top - PAD, left - PAD, mirror], axis=1).astype(np.int32)


def pad(images: np.ndarray) -> np.ndarray:
    """[n, h, w, c] images with a black border of `PAD` pixels, and their mirror images: [2, n, …]."""
    bordered = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    return np.stack([bordered, bordered[:, :, ::-1]])


def crop_and_flip(padded: np.ndarray, order: np.ndarray, crops: Crops) -> np.ndarray:
    """The images `order` of a padded set, each cropped and mirrored as `crops` says."""
    _, count, high, wide, channels = padded.shape
    height, width = high - 2 * PAD, wide - 2 * PAD
    top, left, mirror = crops[:, 0] + PAD, crops[:, 1] + PAD, crops[:, 2]
    left = np.where(mirror, 2 * PAD - left, left)  # the same pixels in the mirror image
    side, image, row, column, _ = padded.strides
    windows = np.lib.stride_tricks.as_strided(
        padded,
        (2, count, 2 * PAD + 1, 2 * PAD + 1, height, width * channels),
        (side, image, row, column, row, 1),
        writeable=False,
    )
    chosen: np.ndarray = windows[mirror, order, top, left]
    return chosen.reshape(len(order), height, width, channels)
