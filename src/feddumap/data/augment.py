"""Shuffling, cropping and flipping a whole epoch at once, on bytes.

One gather builds the epoch: every output pixel names the input pixel it shows. That is several times cheaper
than a transform for each image, and only uint8 moves.
"""

import numpy as np
import torch
import torch.nn.functional as F

PAD = 4


def pad(images: torch.Tensor) -> torch.Tensor:
    """A black border of `PAD` pixels round [n, h, w, c] images, for `crop_and_flip`."""
    return F.pad(images, (0, 0, PAD, PAD, PAD, PAD))


def crop_and_flip(padded: torch.Tensor, order: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """The images `order` of a padded set, each cropped at a random place and mirrored half of the time."""
    count, height, width = len(order), padded.shape[1] - 2 * PAD, padded.shape[2] - 2 * PAD
    top, left = torch.from_numpy(rng.integers(0, 2 * PAD + 1, size=(2, count))).to(padded.device)
    mirror = torch.from_numpy(rng.random(count) < 0.5).to(padded.device)
    column = torch.arange(width, device=padded.device).expand(count, width)
    column = torch.where(mirror[:, None], width - 1 - column, column) + left[:, None]
    row = torch.arange(height, device=padded.device) + top[:, None]
    pixel = (order[:, None] * padded.shape[1] + row)[:, :, None] * padded.shape[2] + column[:, None, :]
    return padded.view(-1, padded.shape[3])[pixel]
