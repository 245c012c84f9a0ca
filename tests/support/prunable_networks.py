"""Small networks of many kinds, with what a pruning may do to each: the table that tests of cuts walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from feddumap import models
from feddumap.core.messages import Architecture, InputSpec

IMAGE = InputSpec("image", (3, 12, 12))
TABLE = InputSpec("numbers", (7,))
TOKENS = InputSpec("tokens", (6,), vocabulary=11)
SIGNAL = InputSpec("numbers", (2, 16))


def plain(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 9, 10), nn.ReLU(), nn.Linear(10, classes),
    )  # fmt: skip


def normalised(norm: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """Two convolutions with a norm behind each, global average pooling."""
    return lambda classes: nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 12, 3), norm(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, classes),
    )  # fmt: skip


class ConvNext(nn.Module):
    """Depthwise convolution, layer norm over channels, two linear layers, layer scale, residual sum."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.LayerNorm(8)
        self.expand, self.project = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.1))
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.project(F.gelu(self.expand(y)))
        x = x + y.permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class Separable(nn.Module):
    """Depthwise separable convolutions."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.norm1 = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)
        self.pointwise, self.norm2 = nn.Conv2d(8, 10, 1), nn.BatchNorm2d(10)
        self.fc = nn.Linear(10, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.depthwise(F.relu(self.norm0(self.stem(x))))))
        return self.fc(F.relu(self.norm2(self.pointwise(x))).amax((2, 3)))


def grouped(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, classes),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Dense(nn.Module):
    """Each layer reads all before it, concatenated."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm1, self.conv1 = nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3, padding=1)
        self.norm2, self.conv2 = nn.BatchNorm2d(10), nn.Conv2d(10, 4, 3, padding=1)
        self.norm3, self.fc = nn.BatchNorm2d(14), nn.Linear(14, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.conv1(F.relu(self.norm1(x)))], 1)
        x = torch.cat([x, self.conv2(F.relu(self.norm2(x)))], 1)
        return self.fc(F.relu(self.norm3(x)).mean((2, 3)))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a skip connection that is concatenated."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 6, 3, padding=1)
        self.down = nn.Conv2d(6, 10, 3, 2, 1)
        self.up = nn.ConvTranspose2d(10, 8, 2, 2)
        self.leave = nn.Conv2d(14, 5, 3, padding=1)
        self.fc = nn.Linear(5, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.enter(x))
        y = F.relu(self.up(F.relu(self.down(x))))
        return self.fc(F.relu(self.leave(torch.cat([x, y], 1))).mean((2, 3)))


class UpSum(nn.Module):
    """A convolution and a transposed one, added."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 6, 3, padding=1)
        self.down = nn.Conv2d(6, 10, 3, 2, 1)
        self.up = nn.ConvTranspose2d(10, 6, 2, 2)
        self.fc = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.enter(x))
        return self.fc(F.relu(x + self.up(F.relu(self.down(x)))).mean((2, 3)))


class Attention(nn.Module):
    """Embedding, one block of attention in two heads by hand, and a feed-forward part."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.Linear(8, 8)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        n, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(n, length, 2, 4).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        x = x + self.mix(y.transpose(1, 2).reshape(n, length, 8))
        x = x + self.outer(F.gelu(self.inner(self.norm2(x))))
        return self.head(x.mean(1))


class Encoder(nn.Module):
    """torch's own encoder layer, which has a fast path without its modules."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)).mean(1))


def perceptron(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, classes)
    )


def root_mean_square(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 12), nn.RMSNorm(12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, classes)
    )


def signal(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(16, classes),
    )  # fmt: skip


class Moved(nn.Module):
    """A convolution whose maps are rearranged before the linear layer; the one before it is not."""

    def __init__(
        self, classes: int, move: Callable[[torch.Tensor], torch.Tensor], inputs: int = 6 * 16
    ) -> None:
        super().__init__()
        self.free = nn.Conv2d(3, 6, 3, 2)
        self.moved = nn.Conv2d(6, 6, 2)
        self.fc = nn.Linear(inputs, classes)
        self.move = move

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.move(F.relu(self.moved(F.relu(self.free(x))))).flatten(1))


def moved(move: Callable[[torch.Tensor], torch.Tensor], inputs: int = 6 * 16) -> Callable[[int], nn.Module]:
    return lambda classes: Moved(classes, move, inputs)


def gated(x: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, 1)
    return one * other.sigmoid()


class Shared(nn.Module):
    """One module under two names, a free convolution in front, one that the shared ones read."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.free = nn.Conv2d(3, 5, 3)
        self.enter = nn.Conv2d(5, 6, 3)
        self.left = nn.Conv2d(6, 6, 3, padding=1)
        self.right = self.left
        self.fc = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.enter(F.relu(self.free(x))))
        return self.fc(F.relu(self.right(F.relu(self.left(x)))).mean((2, 3)))


class Excited(nn.Module):
    """Squeeze and excitation: linear layers compute a gate for each channel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.squeeze, self.excite = nn.Linear(8, 4), nn.Linear(4, 8)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(F.relu(self.stem(x))))
        gate = self.excite(F.relu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return self.fc((x * gate[:, :, None, None]).mean((2, 3)))


class Summed(nn.Module):
    """Two heads, whose outputs are added."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(7, 10)
        self.one, self.two = nn.Linear(10, 6), nn.Linear(10, 5)
        self.head1, self.head2 = nn.Linear(6, classes), nn.Linear(5, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.body(x))
        return self.head1(F.relu(self.one(x))) + self.head2(F.relu(self.two(x)))


def frozen(classes: int) -> nn.Module:
    """The first convolution of a chain of four, and the last, are not trained."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 6, 3), nn.ReLU(),
        nn.Conv2d(6, 7, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, classes),
    )  # fmt: skip
    for layer in (network[0], network[6]):
        layer.requires_grad_(False)
    return network


class Reused(nn.Module):
    """One convolution, applied twice."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.again = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1)
        self.fc = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        for _ in range(2):
            x = F.relu(self.again(x))
        return self.fc(x.mean((2, 3)))


class SumOfParts(nn.Module):
    """Two convolutions, concatenated and added to a third."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.whole = nn.Conv2d(3, 9, 3)
        self.left, self.right = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 4, 3)
        self.behind = nn.Conv2d(9, 6, 3)
        self.fc = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.cat([self.left(x), self.right(x)], 1)
        return self.fc(F.relu(self.behind(F.relu(self.whole(x) + parts))).mean((2, 3)))


def parametrized(classes: int) -> nn.Module:
    """Weight norm on the second convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Conv2d(5, 6, 3)), nn.ReLU(),
        nn.Conv2d(6, 7, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, classes),
    )  # fmt: skip


class Unused(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.spare = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)
        self.fc = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.conv(x)).mean((2, 3)))


class OneHead(nn.Module):
    """Attention in one head; the layer behind it is free."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        y = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head(F.relu(self.mix(y)).mean(1))


class Recurrent(nn.Module):
    """An LSTM between linear layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.middle = nn.Linear(5, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(F.relu(self.enter(x.transpose(1, 2))))
        return self.head(F.relu(self.middle(y[:, -1])))


# --- the table --------------------------------------------------------------------------------------------

Readers = dict[str, list[tuple[str, int, int]]]
"""For each layer's leader, who reads its units: (module, first input, inputs a unit)."""


@dataclass(frozen=True)
class Case:
    """A network, which of its layers can be cut and who reads them, which lose the same units (`tied`), and
    the reasons why others cannot, as regular expressions."""

    factory: Callable[[int], nn.Module]
    input: InputSpec
    readers: Readers
    refused: dict[str, str]
    tied: dict[str, set[str]] = field(default_factory=dict)

    @property
    def architecture(self) -> Architecture:
        name = next(key for key, case in CASES.items() if case is self)
        models.register(f"test-prunable-{name}", self.factory)
        return models.architecture(f"test-prunable-{name}", 4, self.input)


OUTPUTS = "are the network's outputs"
TWO = {"0": [("3", 0, 1)], "3": [("8", 0, 1)]}
FREE: Readers = {"free": [("moved", 0, 1)]}
MIXED = "act on more than the weights that a cut removes: on the way to fc they pass "


def unmoved(move: Callable[[torch.Tensor], torch.Tensor], reason: str, inputs: int = 6 * 16) -> Case:
    """A convolution that is refused for `reason`, behind one that can be cut."""
    return Case(moved(move, inputs), IMAGE, FREE, {"moved": reason, "fc": OUTPUTS})


CASES = {
    "plain": Case(
        plain, IMAGE, {"0": [("3", 0, 1)], "3": [("6", 0, 9)], "6": [("8", 0, 1)]}, {"8": OUTPUTS}
    ),
    "batch-norm": Case(normalised(nn.BatchNorm2d), IMAGE, TWO, {"8": OUTPUTS}),
    "instance-norm": Case(
        normalised(lambda width: nn.InstanceNorm2d(width, affine=True)), IMAGE, TWO, {"8": OUTPUTS}
    ),
    "group-norm-of-one": Case(normalised(lambda width: nn.GroupNorm(1, width)), IMAGE, TWO, {"8": OUTPUTS}),
    "group-norm": Case(
        normalised(lambda width: nn.GroupNorm(4, width)), IMAGE, {},
        {"0": "through 1, which normalises in 4 groups", "3": "through 4, which normalises", "8": OUTPUTS},
    ),
    "convnext": Case(
        ConvNext, IMAGE, {"stem": [("expand", 0, 1), ("head", 0, 1)], "expand": [("project", 0, 1)]},
        {"head": OUTPUTS}, {"stem": {"project", "depthwise"}},
    ),
    "separable": Case(
        Separable, IMAGE, {"stem": [("pointwise", 0, 1)], "pointwise": [("fc", 0, 1)]}, {"fc": OUTPUTS},
        {"stem": {"depthwise"}},
    ),
    "grouped": Case(
        grouped, IMAGE, {"4": [("8", 0, 4)]},
        {"0": "its channels run through 2, which has 2 groups", "2": "it has 2 groups", "8": OUTPUTS},
    ),
    "residual": Case(
        Residual, IMAGE, {"stem": [("conv1", 0, 1), ("fc", 0, 1)], "conv1": [("conv2", 0, 1)]},
        {"fc": OUTPUTS}, {"stem": {"conv2"}},
    ),
    "dense": Case(
        Dense, IMAGE,
        {
            "stem": [("conv1", 0, 1), ("conv2", 0, 1), ("fc", 0, 1)],
            "conv1": [("conv2", 6, 1), ("fc", 6, 1)],
            "conv2": [("fc", 10, 1)],
        },
        {"fc": OUTPUTS},
    ),
    "unet": Case(
        UNet, IMAGE,
        {
            "enter": [("down", 0, 1), ("leave", 0, 1)], "down": [("up", 0, 1)], "up": [("leave", 6, 1)],
            "leave": [("fc", 0, 1)],
        },
        {"fc": OUTPUTS},
    ),
    "transposed-sum": Case(
        UpSum, IMAGE, {"enter": [("down", 0, 1), ("fc", 0, 1)], "down": [("up", 0, 1)]}, {"fc": OUTPUTS},
        {"enter": {"up"}},
    ),
    "sum-of-parts": Case(
        SumOfParts, IMAGE, {"behind": [("fc", 0, 1)]},
        {**dict.fromkeys(("whole", "left", "right"), "tied to .* which has another"), "fc": OUTPUTS},
    ),
    "attention": Case(
        Attention, TOKENS, {"inner": [("outer", 0, 1)]},
        {
            **dict.fromkeys(("query", "key", "value"), "shape .* is invalid .* mix they pass view or"),
            **dict.fromkeys(("mix", "outer"), r"tied to embedding \(Embedding\), which is not cut"),
            "head": OUTPUTS,
        },
    ),
    "one-head": Case(
        OneHead, TOKENS, {"mix": [("head", 0, 1)]},
        {**dict.fromkeys(("query", "key", "value"), "act on more .* a product of act"), "head": OUTPUTS},
    ),
    "encoder-layer": Case(
        Encoder, TOKENS, {"layer.linear1": [("layer.linear2", 0, 1)]},
        {
            "layer.self_attn.out_proj": "it is part of the attention layer.self_attn",
            "layer.linear2": r"tied to embedding \(Embedding\)", "head": OUTPUTS,
        },
    ),
    "perceptron": Case(perceptron, TABLE, {"0": [("3", 0, 1)], "3": [("5", 0, 1)]}, {"5": OUTPUTS}),
    "rms-norm": Case(root_mean_square, TABLE, {"0": [("3", 0, 1)], "3": [("5", 0, 1)]}, {"5": OUTPUTS}),
    "signal": Case(signal, SIGNAL, {"0": [("3", 0, 1)], "3": [("7", 0, 2)]}, {"7": OUTPUTS}),
    "lstm": Case(
        Recurrent, SIGNAL, {"middle": [("head", 0, 1)]},
        {"enter": r"tied to lstm \(LSTM\), which is not cut", "head": OUTPUTS},
    ),
    "chunk": unmoved(gated, "a trial cut cannot run .* to fc they pass chunk or split", 3 * 16),
    "glu": unmoved(lambda x: F.glu(x, 1), "a trial cut cannot run .* to fc they pass GLU", 3 * 16),
    "permute": unmoved(lambda x: x.permute(0, 2, 3, 1), f"{MIXED}permute, view or flatten"),
    "flip": unmoved(lambda x: x.flip(1), f"{MIXED}flip"),
    "roll": unmoved(lambda x: x.roll(1, 1), f"{MIXED}roll"),
    "softmax": unmoved(lambda x: x.softmax(1), f"{MIXED}softmax"),
    "slice": unmoved(lambda x: x[:, 1:], "they pass slicing", 5 * 16),
    "shared": Case(
        Shared, IMAGE, {"free": [("enter", 0, 1)]},
        {
            "left": "^its weights are shared with right$",
            "enter": "^its units run through left, whose weights are shared with right$", "fc": OUTPUTS,
        },
    ),
    "reused": Case(
        Reused, IMAGE, {"stem": [("again", 0, 1), ("fc", 0, 1)]}, {"fc": OUTPUTS}, {"stem": {"again"}}
    ),
    "squeeze-excitation": Case(
        Excited, IMAGE,
        {
            "stem": [("conv", 0, 1)], "conv": [("squeeze", 0, 1), ("fc", 0, 1)], "squeeze": [("excite", 0, 1)]
        },
        {"fc": OUTPUTS}, {"conv": {"excite"}},
    ),
    "two-heads": Case(
        Summed, TABLE,
        {"body": [("one", 0, 1), ("two", 0, 1)], "one": [("head1", 0, 1)], "two": [("head2", 0, 1)]},
        {"head1": OUTPUTS, "head2": OUTPUTS},
    ),
    "frozen": Case(
        frozen, IMAGE, {"2": [("4", 0, 1)]},
        {"0": "^it is frozen", "4": "run through 6, which is frozen", "6": "^it is frozen", "10": OUTPUTS},
    ),
    "weight-norm": Case(
        parametrized, IMAGE, {"4": [("8", 0, 1)]},
        {"0": "through 2, whose weights are computed", "2": "^its weights are computed", "8": OUTPUTS},
    ),
    "unused": Case(
        Unused, IMAGE, {"conv": [("fc", 0, 1)]},
        {"spare": "it is not called, or the outputs do not depend on it", "fc": OUTPUTS},
    ),
}  # fmt: skip
