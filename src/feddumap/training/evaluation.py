"""Accuracy and loss of a model, summed over fixed chunks so that results do not depend on the workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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
    """The sums over some images: correct predictions, cross-entropy and number of images; if the images
    belong to devices, the correct predictions and the number of images of each device; and, if a backdoor is
    tried, the images with its trigger that are predicted as the attacker wants, and their number."""

    correct: int
    loss: float
    count: int
    devices: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    backdoor: tuple[int, int] = (0, 0)

    @staticmethod
    def total(parts: Iterable[Score]) -> Score:
        scores = list(parts)
        devices: dict[int, tuple[int, int]] = {}
        for device, (correct, count) in (pair for score in scores for pair in score.devices.items()):
            before = devices.get(device, (0, 0))
            devices[device] = (before[0] + correct, before[1] + count)
        return Score(
            sum(score.correct for score in scores),
            math.fsum(score.loss for score in scores),
            sum(score.count for score in scores),
            devices,
            (sum(score.backdoor[0] for score in scores), sum(score.backdoor[1] for score in scores)),
        )

    def to_json(self) -> list[Any]:
        return [
            self.correct,
            self.loss,
            self.count,
            [[device, *sums] for device, sums in self.devices.items()],
            list(self.backdoor),
        ]

    @staticmethod
    def from_json(value: list[Any]) -> Score:
        """Read `to_json`'s result back."""
        correct, loss, count, devices, (fooled, tried) = value
        by_device = {device: (right, of) for device, right, of in devices}
        return Score(correct, loss, count, by_device, (fooled, tried))

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    @property
    def mean_loss(self) -> float:
        return self.loss / self.count


def device_accuracy(score: Score) -> dict[str, float | int] | None:
    """Statistics of the devices' accuracies on their own test images: mean, mean of the worst tenth (at least
    one device), standard deviation, number of devices; None if no device has any.

    >>> device_accuracy(Score(3, 1.0, 8, {0: (1, 2), 4: (2, 2), 5: (0, 4)}))
    {'mean': 0.5, 'worst_tenth': 0.0, 'spread': 0.408248290463863, 'devices': 3}
    """
    if not score.devices:
        return None
    each = sorted(correct / count for correct, count in score.devices.values())
    mean = math.fsum(each) / len(each)
    worst = each[: max(1, len(each) // 10)]
    variance = math.fsum((value - mean) ** 2 for value in each) / len(each)
    return {
        "mean": mean,
        "worst_tenth": math.fsum(worst) / len(worst),
        "spread": math.sqrt(variance),
        "devices": len(each),
    }


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
    parts = (samples[a:b].to(device) for a, b in chunks(len(samples)))
    return Score.total(score(model, part) for part in parts)


def score_within(architecture: Architecture, weights: Tensors, samples: Samples, config: Config) -> Score:
    """The score on samples of some classes, with the outputs of all other classes left out: whether a model
    tends to the classes at hand does not matter, so models can be compared on data that lacks classes."""
    device = config.run.device
    model = make_model(architecture, weights, config.train.kernels, device)
    classes, places = np.unique(samples.targets.numpy(), return_inverse=True)
    present, targets = torch.from_numpy(classes), torch.from_numpy(places)
    parts = (samples.inputs[a:b].to(device) for a, b in chunks(len(samples)))
    outputs = torch.cat([model.outputs(part).cpu() for part in parts])[:, present]
    loss = F.cross_entropy(outputs.double(), targets, reduction="sum")
    return Score(int((outputs.argmax(dim=1) == targets).sum()), float(loss), len(samples))


def score(model: Model | nn.Module, samples: Samples, devices: np.ndarray | None = None) -> Score:
    """The score on one chunk, in eval mode without augmentation; `devices` are those that the samples belong
    to, −1 for none."""
    outputs = as_model(model).outputs(samples.inputs)
    with torch.inference_mode():
        loss = F.cross_entropy(outputs.double(), samples.targets, reduction="sum")
        right = outputs.argmax(dim=1) == samples.targets
    found = _by_device(right.cpu().numpy(), devices) if devices is not None else {}
    return Score(int(right.sum()), float(loss), len(samples), found)


def _by_device(right: np.ndarray, devices: np.ndarray) -> dict[int, tuple[int, int]]:
    owned = devices >= 0
    names, places, counts = np.unique(devices[owned], return_inverse=True, return_counts=True)
    correct = np.bincount(places[right[owned]], minlength=len(names))
    rows = zip(names.tolist(), correct.tolist(), counts.tolist(), strict=True)
    return {device: (good, count) for device, good, count in rows}
