"""A network that a user might bring."""

from torch import nn


def make(classes: int, in_channels: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, classes),
    )
