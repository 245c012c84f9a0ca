"""Accuracy and loss of a model, summed over fixed chunks so that results do not depend on the workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from feddumap.config import Config
from feddumap.core.messages import Architecture, Tensors
from feddumap.training.backends import as_model, make_model
from feddumap.training.model import Model
from feddumap.training.samples import Samples

CHUNK = 250


@dataclass(frozen=True)
class Score:
    """The sums over some images: correct predictions, cross-entropy and number of images."""

    correct: int
    loss: float
    count: int

    @staticmethod
    def total(parts: Iterable[Score]) -> Score:
        scores = list(parts)
        return Score(
            sum(score.correct for score in scores),
            math.fsum(score.loss for score in scores),
            sum(score.count for score in scores),
        )

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    @property
    def mean_loss(self) -> float:
        return self.loss / self.count


def chunks(count: int) -> list[tuple[int, int]]:
    """[0, count) in spans of CHUNK.

    >>> chunks(600)
    [(0, 250), (250, 500), (500, 600)]
    """
    return [(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]


def score_weights(architecture: Architecture, weights: Tensors, samples: Samples, config: Config) -> Score:
    """The score of a network with these weights on all samples."""
    device = config.run.device
    model = make_model(architecture, weights, config.train.kernels, device)
    parts = (Samples(samples.images[a:b], samples.labels[a:b]).to(device) for a, b in chunks(len(samples)))
    return Score.total(score(model, part) for part in parts)


def score(model: Model | nn.Module, samples: Samples) -> Score:
    """The score on one chunk, in eval mode without augmentation."""
    outputs = as_model(model).outputs(samples.images)
    with torch.inference_mode():
        loss = F.cross_entropy(outputs.double(), samples.labels, reduction="sum")
        correct = (outputs.argmax(dim=1) == samples.labels).sum()
    return Score(int(correct), float(loss), len(samples))
