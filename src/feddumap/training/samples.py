"""Inputs with their labels, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from feddumap.core.messages import InputSpec
from feddumap.training.augment import Crops, crop_and_flip, draw, pad

MIN_FREQUENCY = 1e-4  # of a label in `label_shift`


@dataclass(frozen=True)
class Samples:
    """Stored inputs [n, …] (see `InputSpec`) and their labels [n].

    >>> some = Samples(torch.arange(6).view(3, 2), torch.tensor([0, 1, 0]))
    >>> some[1:].targets, len(some + some)
    (tensor([1, 0]), 6)
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __add__(self, other: Samples) -> Samples:
        return Samples(torch.cat([self.inputs, other.inputs]), torch.cat([self.targets, other.targets]))

    def __getitem__(self, index: slice | torch.Tensor | np.ndarray | list[int]) -> Samples:
        return Samples(self.inputs[index], self.targets[index])

    @property
    def nbytes(self) -> int:
        """The size of a message with these samples: the inputs as stored, and a byte per label."""
        return self.inputs.nbytes + len(self.targets)

    @staticmethod
    def take(inputs: np.ndarray, labels: np.ndarray, indices: np.ndarray) -> Samples:
        """Copy some samples of a (memory-mapped) dataset."""
        return Samples(torch.from_numpy(inputs[indices]), torch.from_numpy(labels[indices].astype(np.int64)))

    def to(self, device: str) -> Samples:
        return Samples(self.inputs.to(device), self.targets.to(device))


def to_input(stored: torch.Tensor) -> torch.Tensor:
    """What a network receives of stored inputs: bytes [n, h, w, c] become floats in [0, 1] of shape
    [n, c, h, w], channels-last in memory; floats and integers remain as they are."""
    return stored.permute(0, 3, 1, 2) / 255 if stored.dtype == torch.uint8 else stored


class InputSource:
    """The stored inputs of several epochs; images are padded by `crop` pixels on first use."""

    def __init__(self, inputs: torch.Tensor, crop: int = 0) -> None:
        self.stored = inputs.contiguous()
        self.crop = crop

    @cached_property
    def padded(self) -> np.ndarray:
        return pad(self.stored.cpu().numpy(), self.crop)


@dataclass(frozen=True)
class Epoch:
    """The inputs of an epoch in their order, cropped and mirrored by `crops` if given, in batches of `size`.

    `targets` are the labels or other targets of the loss, in the same order. `shift` is added to the outputs
    before cross-entropy (`label_shift`).
    """

    source: InputSource
    order: np.ndarray
    targets: torch.Tensor
    size: int
    crops: Crops | None = None
    shift: torch.Tensor | None = None

    @cached_property
    def inputs(self) -> torch.Tensor:
        """All inputs of the epoch, as stored."""
        stored = self.source.stored
        if self.crops is None:
            return stored[torch.from_numpy(self.order).to(stored.device)]
        cropped = crop_and_flip(self.source.padded, self.order, self.crops, self.source.crop)
        return torch.from_numpy(cropped).to(stored.device)

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
        return to_input(self.epoch.inputs[self.start : self.stop])

    @property
    def targets(self) -> torch.Tensor:
        return self.epoch.targets[self.start : self.stop]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.inputs, self.targets))


def label_shift(labels: torch.Tensor, classes: int, tau: float | None) -> torch.Tensor | None:
    """τ log π, where π are the label frequencies, at least 1e-4; None if τ is 0 or not set.

    Cross-entropy on z + τ log π (balanced softmax; Ren et al., 2020) does not push down the outputs of
    classes that a node does not have.

    >>> label_shift(torch.tensor([0, 0, 2, 2]), 3, 1.0)
    tensor([-0.6931, -9.2103, -0.6931])
    """
    if not tau:
        return None
    frequencies = torch.bincount(labels, minlength=classes).double() / len(labels)
    return (tau * frequencies.clamp_min(MIN_FREQUENCY).log()).float()


def batches(
    samples: Samples,
    epochs: int,
    size: int,
    rng: np.random.Generator,
    *,
    augment: InputSpec | None,
    shift: torch.Tensor | None = None,
) -> Iterator[Batch]:
    """E epochs of ⌈n/B⌉ shuffled batches; images are cropped and mirrored as `augment` says, if given."""
    augmented = augment if augment is not None and (augment.crop or augment.flip) else None
    source = InputSource(samples.inputs, augmented.crop if augmented else 0)
    size = min(size, len(samples))  # a model allocates for the largest batch
    for _ in range(epochs):
        order = rng.permutation(len(samples))
        crops = draw(len(order), rng, augmented.crop, flip=augmented.flip) if augmented else None
        targets = samples.targets[torch.from_numpy(order).to(samples.targets.device)]
        yield from Epoch(source, order, targets, size, crops, shift).batches()
