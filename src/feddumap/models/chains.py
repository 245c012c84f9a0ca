"""CNN, LeNet5, VGG11 and MLP: a sequence of convolutions, then a sequence of linear layers."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from feddumap.core.messages import InputSpec


@dataclass(frozen=True)
class Chain:
    """A chain of `conv1`, `conv2`, … and `fc1`, `fc2`, …, with ReLU between layers.

    `channels` are the full widths, `pooled` the indices of the convolutions followed by a 2×2 max-pool,
    `hidden` the widths of the hidden linear layers. For images too small for the chain, a convolution larger
    than its map is padded to keep the map's size, and a pool that would leave nothing is omitted.
    """

    channels: tuple[int, ...]
    kernel: int
    padding: int
    pooled: tuple[int, ...]
    hidden: tuple[int, ...]

    def full(self, classes: int, given: InputSpec) -> nn.Module:
        """The unpruned network."""
        return self.resized({f"conv{i}": width for i, width in enumerate(self.channels, 1)}, classes, given)

    def resized(self, widths: Mapping[str, int], classes: int, given: InputSpec) -> nn.Module:
        """The network with the given widths; those of hidden linear layers may be omitted.

        Pooling comes before ReLU: the two commute, so values and gradients are unchanged, but ReLU processes
        a quarter of the elements. Flattening is channel by channel, so a channel's inputs of `fc1` are
        adjacent.
        """
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        outputs = [widths[f"conv{i}"] for i in range(1, len(self.channels) + 1)]
        sides = list(given.shape[1:])
        for i, (before, after) in enumerate(pairwise((given.shape[0], *outputs)), 1):
            fits = min(sides) + 2 * self.padding >= self.kernel
            padding = self.padding if fits else self.kernel // 2
            layers[f"conv{i}"] = nn.Conv2d(before, after, self.kernel, padding=padding)
            sides = [side + 2 * padding - self.kernel + 1 for side in sides]
            if i in self.pooled and min(sides) > 1:
                layers[f"pool{i}"] = nn.MaxPool2d(2)
                sides = [side // 2 for side in sides]
            layers[f"relu{i}"] = nn.ReLU()
        layers["flatten"] = nn.Flatten()
        flat = outputs[-1] if outputs else given.shape[0]
        for side in sides:
            flat *= side
        hidden = [widths.get(f"fc{i}", width) for i, width in enumerate(self.hidden, 1)]
        for i, (before, after) in enumerate(pairwise((flat, *hidden, classes)), 1):
            layers[f"fc{i}"] = nn.Linear(before, after)
            if i <= len(hidden):
                layers[f"fc{i}_relu"] = nn.ReLU()
        return nn.Sequential(layers)


CNN = Chain((32, 64, 64), kernel=3, padding=0, pooled=(1, 2), hidden=(64,))
LENET = Chain((6, 16), kernel=5, padding=0, pooled=(1, 2), hidden=(120, 84))
VGG11 = Chain(
    (64, 128, 256, 256, 512, 512, 512, 512), kernel=3, padding=1, pooled=(1, 2, 4, 6, 8), hidden=(512, 512)
)
MLP = Chain((), kernel=1, padding=0, pooled=(), hidden=(128, 64))
