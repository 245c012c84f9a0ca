"""The task as a user of any framework would write it: plain networks, random partitions, a loop of SGD.

Both peers use it. The networks are feddumap's own in torch's default memory layout.
"""

import os
import time
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

from feddumap.models import chains, resnet

STARTED = float(os.environ.get("PEERS_SPAWNED") or time.time())
"""When the command was given: run.py tells, as Python's own start belongs to it."""

NETWORKS = {
    "cnn": chains.CNN.full,
    "lenet": chains.LENET.full,
    "vgg11": chains.VGG11.full,
    "resnet18": resnet.full,
}
CLASSES = 10
DEVICES, COHORT, SAMPLES = 100, 10, int(os.environ.get("PEERS_SAMPLES") or 400)
EPOCHS, BATCH, LR = 5, 10, 0.1


def network(name: str) -> nn.Module:
    return NETWORKS[name](CLASSES)


def partition(device: int) -> TensorDataset:
    """A device's random images, as floats already, and labels."""
    generator = torch.Generator().manual_seed(device)
    pixels = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return TensorDataset(pixels / 255, labels)


def report(ends: list[float]) -> dict[str, object]:
    """From the times at which rounds ended: seconds of each round after the first, and the time to that."""
    rounds = [after - before for before, after in pairwise(ends)]
    return {"startup_seconds": ends[0] - STARTED, "round_seconds": rounds}
