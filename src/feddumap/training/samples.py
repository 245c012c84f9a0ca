"""Images and labels, and the batches in which they are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from feddumap.training.augment import Crops, crop_and_flip, draw, pad

RAREST = 1e-4  # the frequency of a label that does not occur


@dataclass(frozen=True)
class Samples:
    """Images as bytes [n, h, w, c] and their labels [n]."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __add__(self, other: Samples) -> Samples:
        return Samples(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels]))

    @property
    def nbytes(self) -> int:
        """What sending them takes: a byte a pixel value, and a byte for each label."""
        return self.images.nbytes + len(self.labels)

    @staticmethod
    def take(images: np.ndarray, labels: np.ndarray, indices: np.ndarray) -> Samples:
        """Copy the chosen images out of a (memory-mapped) data set."""
        return Samples(torch.from_numpy(images[indices]), torch.from_numpy(labels[indices].astype(np.int64)))

    def to(self, device: str) -> Samples:
        return Samples(self.images.to(device), self.labels.to(device))


def to_input(images: torch.Tensor) -> torch.Tensor:
    """Bytes [n, h, w, c] as floats in [0, 1], seen as [n, c, h, w]: channels-last in memory, no copy more."""
    return images.permute(0, 3, 1, 2) / 255


class Pictures:
    """The images that epochs are made of; padded once for all of them, if somebody wants that."""

    def __init__(self, images: torch.Tensor) -> None:
        self.bytes = images.contiguous()

    @cached_property
    def padded(self) -> np.ndarray:
        return pad(self.bytes.cpu().numpy())


@dataclass(frozen=True)
class Epoch:
    """Images in an order, each cropped and mirrored in its own way or not at all, in batches of `size`.

    `targets` are the labels, or whatever else the loss compares with, in that order. `shift` is added to the
    outputs before cross-entropy (`label_shift`).
    """

    pictures: Pictures
    order: np.ndarray
    targets: torch.Tensor
    size: int
    crops: Crops | None = None
    shift: torch.Tensor | None = None

    @cached_property
    def images(self) -> torch.Tensor:
        """All of them, as bytes: one look-up for a whole epoch."""
        source = self.pictures.bytes
        if self.crops is None:
            return source[torch.from_numpy(self.order).to(source.device)]
        return torch.from_numpy(crop_and_flip(self.pictures.padded, self.order, self.crops)).to(source.device)

    def batches(self) -> Iterator[Batch]:
        """⌈n/B⌉ batches; the last one may be smaller, none is dropped."""
        for start in range(0, len(self.order), self.size):
            yield Batch(self, start, min(start + self.size, len(self.order)))


@dataclass(frozen=True)
class Batch:
    """A part of an epoch. Unpacked, it is the network's inputs and the targets."""

    epoch: Epoch
    start: int
    stop: int

    @property
    def inputs(self) -> torch.Tensor:
        return to_input(self.epoch.images[self.start : self.stop])

    @property
    def targets(self) -> torch.Tensor:
        return self.epoch.targets[self.start : self.stop]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.inputs, self.targets))


def label_shift(labels: torch.Tensor, classes: int, tau: float) -> torch.Tensor | None:
    """τ log π, where π are the frequencies of these labels and at least 1e-4; None if τ = 0.

    Cross-entropy on z + τ log π (balanced softmax; Ren et al., 2020) no longer pushes down the outputs of
    classes that a node does not have.

    >>> label_shift(torch.tensor([0, 0, 2, 2]), 3, 1.0)
    tensor([-0.6931, -9.2103, -0.6931])
    """
    if tau == 0:
        return None
    frequencies = torch.bincount(labels, minlength=classes).double() / len(labels)
    return (tau * frequencies.clamp_min(RAREST).log()).float()


def batches(
    samples: Samples,
    epochs: int,
    size: int,
    rng: np.random.Generator,
    *,
    augment: bool,
    shift: torch.Tensor | None = None,
) -> Iterator[Batch]:
    """E epochs of ⌈n/B⌉ shuffled batches."""
    pictures = Pictures(samples.images)
    for _ in range(epochs):
        order = rng.permutation(len(samples))
        crops = draw(len(order), rng) if augment else None
        targets = samples.labels[torch.from_numpy(order).to(samples.labels.device)]
        yield from Epoch(pictures, order, targets, size, crops, shift).batches()
