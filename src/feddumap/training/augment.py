"""Random crops and horizontal flips of images as bytes.

The C kernels crop while reading. For torch, a whole epoch is cropped at once: all possible crops of an image
are strided windows of the same memory, so one indexing operation copies the chosen ones.
"""

from __future__ import annotations

import numpy as np

PAD = 4

Crops = np.ndarray
"""int32 [n, 3]: for each image the row and column of the original where its crop starts (−4 … 4; black
outside), and whether the crop is mirrored."""


def draw(count: int, rng: np.random.Generator) -> Crops:
    """Random crops, mirrored with probability 1/2."""
    top, left = rng.integers(0, 2 * PAD + 1, size=(2, count))
    mirror = rng.random(count) < 0.5
    return np.stack([top - PAD, left - PAD, mirror], axis=1).astype(np.int32)


def pad(images: np.ndarray) -> np.ndarray:
    """Images [n, h, w, c] with a black border of `PAD` pixels, and their mirror images: [2, n, …]."""
    bordered = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    return np.stack([bordered, bordered[:, :, ::-1]])


def crop_and_flip(padded: np.ndarray, order: np.ndarray, crops: Crops) -> np.ndarray:
    """The images `order` of a padded set, cropped and mirrored by `crops`."""
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
