"""CNN, LeNet5 and VGG11: a sequence of convolutions, then a sequence of linear layers."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import nn


@dataclass(frozen=True)
class Chain:
    """A chain of `conv1`, `conv2`, … and `fc1`, `fc2`, …, with ReLU between layers.

    `channels` are the full widths, `pooled` the indices of the convolutions followed by a 2×2 max-pool,
    `side` the height and width of the last feature maps, `hidden` the widths of the hidden linear layers.
    """

    channels: tuple[int, ...]
    kernel: int
    padding: int
    pooled: tuple[int, ...]
    side: int
    hidden: tuple[int, ...]

    def full(self, classes: int) -> nn.Module:
        """The unpruned network."""
        return self.resized({f"conv{i}": width for i, width in enumerate(self.channels, 1)}, classes)

    def resized(self, widths: Mapping[str, int], classes: int) -> nn.Module:
        """The network with the given convolution widths.

        Pooling comes before ReLU: the two commute, so values and gradients are unchanged, but ReLU processes
        a quarter of the elements. Flattening is channel by channel, so a channel's side² inputs of `fc1` are
        adjacent.
        """
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        outputs = [widths[f"conv{i}"] for i in range(1, len(self.channels) + 1)]
        for i, (before, after) in enumerate(pairwise((3, *outputs)), 1):
            layers[f"conv{i}"] = nn.Conv2d(before, after, self.kernel, padding=self.padding)
            if i in self.pooled:
                layers[f"pool{i}"] = nn.MaxPool2d(2)
            layers[f"relu{i}"] = nn.ReLU()
        layers["flatten"] = nn.Flatten()
        features = (outputs[-1] * self.side**2, *self.hidden, classes)
        for i, (before, after) in enumerate(pairwise(features), 1):
            layers[f"fc{i}"] = nn.Linear(before, after)
            if i <= len(self.hidden):
                layers[f"fc{i}_relu"] = nn.ReLU()
        return nn.Sequential(layers)


CNN = Chain((32, 64, 64), kernel=3, padding=0, pooled=(1, 2), side=4, hidden=(64,))
LENET = Chain((6, 16), kernel=5, padding=0, pooled=(1, 2), side=5, hidden=(120, 84))
VGG11 = Chain(
    (64, 128, 256, 256, 512, 512, 512, 512),
    kernel=3,
    padding=1,
    pooled=(1, 2, 4, 6, 8),
    side=1,
    hidden=(512, 512),
)
