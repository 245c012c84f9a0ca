"""Small networks of every kind that a user might bring, for images of one channel.

`module:factory` names them: `name_of("attention")`. Sequence layers read an image as a sequence of its rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def name_of(network: str) -> str:
    return f"{__name__}:{network}"


class Pooled(nn.Module):
    """Some layers, then the mean of every channel and a linear layer."""

    def __init__(self, *layers: nn.Module, channels: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(F.relu(self.layers(x)).mean((2, 3)))
        return y


def batch_norm(classes: int, in_channels: int) -> nn.Module:
    layers = nn.Conv2d(in_channels, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4)
    return Pooled(*layers, channels=4, classes=classes)


def group_norm(classes: int, in_channels: int) -> nn.Module:
    return Pooled(nn.Conv2d(in_channels, 4, 3, stride=2), nn.GroupNorm(2, 4), channels=4, classes=classes)


def layer_norm(classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, 8),
        nn.LayerNorm(8),
        nn.GELU(),
        nn.Linear(8, classes),
    )


def instance_norm(classes: int, in_channels: int) -> nn.Module:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return Pooled(nn.Conv2d(in_channels, 4, 3, stride=2), norm, channels=4, classes=classes)


def depthwise(classes: int, in_channels: int) -> nn.Module:
    layers = nn.Conv2d(in_channels, 4, 1), nn.Conv2d(4, 4, 3, stride=2, groups=4), nn.Conv2d(4, 6, 1)
    return Pooled(*layers, channels=6, classes=classes)


def grouped(classes: int, in_channels: int) -> nn.Module:
    layers = nn.Conv2d(in_channels, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2)
    return Pooled(*layers, channels=6, classes=classes)


def transposed(classes: int, in_channels: int) -> nn.Module:
    layers = nn.Conv2d(in_channels, 4, 3, stride=4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2, stride=2)
    return Pooled(*layers, channels=3, classes=classes)


class Residual(nn.Module):
    def __init__(self, classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 4, 3, stride=2)
        self.block = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        y: torch.Tensor = self.head((x + F.relu(self.block(x))).mean((2, 3)))
        return y


class Concatenated(nn.Module):
    def __init__(self, classes: int, in_channels: int) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(in_channels, 3, 3, stride=2), nn.Conv2d(in_channels, 2, 3, stride=2)
        self.head = nn.Linear(5, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(F.relu(torch.cat([self.left(x), self.right(x)], 1)).mean((2, 3)))
        return y


class Attention(nn.Module):
    """An encoder layer with dropout, which draws from torch's global generator."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(input_shape[2], 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.encoder(self.embed(x[:, 0])).mean(1))
        return y


class Recurrent(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], classes: int, kind: str = "LSTM") -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(input_shape[2], 6, batch_first=True)
        self.head = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.cells(x[:, 0])[0][:, -1])
        return y


def gru(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Recurrent(input_shape, classes, "GRU")


class Bag(nn.Module):
    """An embedding bag of grey values, and constants that are not floats."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(8, 6)
        self.head = nn.Linear(6, classes, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("order", torch.arange(8, dtype=torch.int32))
        self.register_buffer("used", torch.ones(8, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        y: torch.Tensor = self.head(self.bag((x.flatten(1) * 7).long()))
        return y


def sequence(classes: int, in_channels: int) -> nn.Module:
    """One-dimensional convolutions over the pixels."""
    return nn.Sequential(
        nn.Flatten(2),
        nn.Conv1d(in_channels, 4, 5, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


# tied tensors


class TiedLinear(nn.Module):
    """An embedding whose weights are also those of the output layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, classes, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grey = (x.flatten(1) * 9).long()
        y: torch.Tensor = self.out(torch.tanh(self.mix(self.embed(grey).mean(1))))
        return y


class UntiedLinear(nn.Module):
    """The same function, with one name for each tensor."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grey = (x.flatten(1) * 9).long()
        return F.linear(torch.tanh(self.mix(self.embed(grey).mean(1))), self.embed.weight)


class UsedTwice(nn.Module):
    """A convolution and a norm under two names each."""

    def __init__(self, classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 4, 3, stride=2)
        self.first = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.second = self.first
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(self.stem(x)))))
        y: torch.Tensor = self.head(x.mean((2, 3)))
        return y


class UsedOnce(nn.Module):
    """The same function, with one name for each tensor."""

    def __init__(self, classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 4, 3, stride=2)
        self.first = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(torch.tanh(self.first(self.stem(x)))))
        y: torch.Tensor = self.head(x.mean((2, 3)))
        return y


TIED = {
    "TiedLinear": ("UntiedLinear", "embed.weight", "out.weight"),
    "UsedTwice": ("UsedOnce", "first.0.weight", "second.0.weight"),
}
"""The same function without ties, and two names of one tensor."""


# frozen tensors


class PartlyFrozen(nn.Module):
    """A frozen convolution with a trained bias, a frozen norm, trained layers, and one that is not used."""

    def __init__(self, classes: int, in_channels: int) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(in_channels, 6, 3, stride=2)
        self.norm = nn.BatchNorm2d(6)
        self.middle = nn.Conv2d(6, 5, 3)
        self.head = nn.Linear(5, classes)
        self.unused = nn.Linear(3, 2)
        for parameter in (self.backbone.weight, *self.norm.parameters()):
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.backbone(x)))
        y: torch.Tensor = self.head(F.relu(self.middle(x)).mean((2, 3)))
        return y


FROZEN = {"backbone.weight", "norm.weight", "norm.bias"}

KINDS = [
    "batch_norm", "group_norm", "layer_norm", "instance_norm", "depthwise", "grouped", "transposed",
    "Residual", "Concatenated", "Attention", "Recurrent", "gru", "Bag", "sequence", "TiedLinear",
    "UsedTwice", "PartlyFrozen",
]  # fmt: skip
