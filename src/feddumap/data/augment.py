"""Shuffling, cropping and flipping a whole epoch at once, on bytes.

All places where an image can be cropped are windows of the same memory, so that one look-up copies the chosen
ones, row by row. That is many times cheaper than a transform for each image, and only bytes move.
"""

import numpy as np

PAD = 4


def pad(images: np.ndarray) -> np.ndarray:
    """[n, h, w, c] images with a black border of `PAD` pixels, and their mirror images: [2, n, …]."""
    bordered = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    return np.stack([bordered, bordered[:, :, ::-1]])


def crop_and_flip(padded: np.ndarray, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The images `order` of a padded set, each cropped at a random place and mirrored half of the time."""
    _, count, high, wide, channels = padded.shape
    height, width = high - 2 * PAD, wide - 2 * PAD
    top, left = rng.integers(0, 2 * PAD + 1, size=(2, len(order)))
    mirror = (rng.random(len(order)) < 0.5).astype(np.intp)
    left = np.where(mirror, 2 * PAD - left, left)  # the same pixels, seen in the mirror
    side, image, row, column, _ = padded.strides
    windows = np.lib.stride_tricks.as_strided(
        padded,
        (2, count, 2 * PAD + 1, 2 * PAD + 1, height, width * channels),
        (side, image, row, column, row, 1),
        writeable=False,
    )
    chosen: np.ndarray = windows[mirror, order, top, left]
    return chosen.reshape(len(order), height, width, channels)
