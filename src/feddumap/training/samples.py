"""Images with labels, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from feddumap.training.augment import Crops, crop_and_flip, draw, pad

MIN_FREQUENCY = 1e-4  # of a label in `label_shift`


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
        """The size of a message with these samples: a byte per pixel value and per label."""
        return self.images.nbytes + len(self.labels)

    @staticmethod
    def take(images: np.ndarray, labels: np.ndarray, indices: np.ndarray) -> Samples:
        """Copy some images of a (memory-mapped) dataset."""
        return Samples(torch.from_numpy(images[indices]), torch.from_numpy(labels[indices].astype(np.int64)))

    def to(self, device: str) -> Samples:
        return Samples(self.images.to(device), self.labels.to(device))


def to_input(images: torch.Tensor) -> torch.Tensor:
    """Bytes [n, h, w, c] as floats in [0, 1], of shape [n, c, h, w] and channels-last in memory."""
    return images.permute(0, 3, 1, 2) / 255


class ImageSource:
    """The images of several epochs, padded once on first use."""

    def __init__(self, images: torch.Tensor) -> None:
        self.bytes = images.contiguous()

    @cached_property
    def padded(self) -> np.ndarray:
        return pad(self.bytes.cpu().numpy())


@dataclass(frozen=True)
class Epoch:
    """The images of an epoch in their order, cropped and mirrored by `crops` if given, in batches of `size`.

    `targets` are the labels or other targets of the loss, in the same order. `shift` is added to the outputs
    before cross-entropy (`label_shift`).
    """

    source: ImageSource
    order: np.ndarray
    targets: torch.Tensor
    size: int
    crops: Crops | None = None
    shift: torch.Tensor | None = None

    @cached_property
    def images(self) -> torch.Tensor:
        """All images of the epoch, as bytes."""
        images = self.source.bytes
        if self.crops is None:
            return images[torch.from_numpy(self.order).to(images.device)]
        return torch.from_numpy(crop_and_flip(self.source.padded, self.order, self.crops)).to(images.device)

    def batches(self) -> Iterator[Batch]:
        """⌈n/B⌉ batches, of which the last may be smaller."""
        for start in range(0, len(self.order), self.size):
            yield Batch(self, start, min(start + self.size, len(self.order)))


@dataclass(frozen=True)
class Batch:
    """A batch of an epoch; unpacks into the inputs of the network and the targets."""

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
    """τ log π, where π are the label frequencies, at least 1e-4; None if τ = 0.

    Cross-entropy on z + τ log π (balanced softmax; Ren et al., 2020) does not push down the outputs of
    classes that a node does not have.

    >>> label_shift(torch.tensor([0, 0, 2, 2]), 3, 1.0)
    tensor([-0.6931, -9.2103, -0.6931])
    """
    if tau == 0:
        return None
    frequencies = torch.bincount(labels, minlength=classes).double() / len(labels)
    return (tau * frequencies.clamp_min(MIN_FREQUENCY).log()).float()


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
    source = ImageSource(samples.images)
    for _ in range(epochs):
        order = rng.permutation(len(samples))
        crops = draw(len(order), rng) if augment else None
        targets = samples.labels[torch.from_numpy(order).to(samples.labels.device)]
        yield from Epoch(source, order, targets, size, crops, shift).batches()
