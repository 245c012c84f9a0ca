"""Chains for the tests of the kernels: networks of any shape, their weights and images, and torch's results.

Most have whole numbers for weights (times powers of two) and images of 0 and 255 only, so that every
activation is exact in float32, in whatever order it is summed. Then pools and ReLUs decide as in float64,
ties included, and nothing but the rounding of gradients is left to tolerate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count, product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from feddumap.training.kernels import loader
from feddumap.training.kernels.chain import AUTOMATIC, DIRECT, DOTS, WINOGRAD, Chain, Images
from feddumap.training.kernels.loader import Library
from feddumap.training.kernels.spec import ChainSpec, spec_of

WAYS = {"automatic": AUTOMATIC, "direct": DIRECT, "winograd": WINOGRAD, "dots": DOTS}
EXACT = 2.0**21  # whole numbers below keep all their bits while they are summed


@lru_cache(maxsize=1)
def libraries() -> dict[str, Library]:
    """Every variant that is built and that this processor can run."""
    folder = Path(loader.__file__).parent
    found = {name: sorted(folder.glob(f"_{name}.*.so")) for name in loader.variants()}
    return {name: Library(paths[0], name) for name, paths in found.items() if paths}


@dataclass(frozen=True)
class Conv:
    """A convolution; `relu` is "", "before" the pool or "after" it."""

    outputs: int
    kernel: tuple[int, int] = (3, 3)
    padding: tuple[int, int] = (0, 0)
    pool: bool = False
    relu: str = "after"


@dataclass(frozen=True)
class Case:
    """A chain and how many images it is given."""

    convolutions: tuple[Conv, ...]
    linear: tuple[int, ...] = (10,)
    channels: int = 3
    size: tuple[int, int] = (8, 8)
    batch: int = 4  # at most
    count: int = 4
    relu: bool = True  # between linear layers

    def __str__(self) -> str:
        layers = "-".join(f"{c.outputs}x{c.kernel[0]}{c.kernel[1]}{'p' * c.pool}" for c in self.convolutions)
        return f"{self.size[0]}x{self.size[1]}x{self.channels}-{layers}-{self.linear[-1]}-of-{self.count}"

    def sides(self) -> tuple[int, int]:
        """Of the last map; below 1 if the images are too small."""
        height, width = self.size
        for layer in self.convolutions:
            height += 2 * layer.padding[0] - layer.kernel[0] + 1
            width += 2 * layer.padding[1] - layer.kernel[1] + 1
            height, width = (side // 2 if layer.pool else side for side in (height, width))
            if min(height, width) < 1:
                return 0, 0
        return height, width

    def network(self) -> nn.Sequential:
        layers: list[nn.Module] = []
        inputs = self.channels
        for layer in self.convolutions:
            layers.append(nn.Conv2d(inputs, layer.outputs, layer.kernel, padding=layer.padding))
            behind = {"before": [nn.ReLU()], "after": []}.get(layer.relu, [])
            behind += [nn.MaxPool2d(2)] if layer.pool else []
            layers += [*behind, nn.ReLU()] if layer.relu == "after" else behind
            inputs = layer.outputs
        layers.append(nn.Flatten())
        height, width = self.sides()
        inputs *= height * width
        for place, outputs in enumerate(self.linear):
            layers += [nn.ReLU()] if place and self.relu else []
            layers.append(nn.Linear(inputs, outputs))
            inputs = outputs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(*layers)


def pairs(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    square = st.integers(low, high).map(lambda side: (side, side))
    return square | st.tuples(st.integers(low, high), st.integers(low, high))


@st.composite
def cases(draw: st.DrawFn, widest: int = 70) -> Case:
    """Chains of any shape whose last map is not empty."""
    widths = st.integers(1, 12) | st.integers(1, widest) | st.sampled_from([8, 16, 24])
    kernels = st.just((3, 3)) | pairs(1, 5)
    convolutions = st.builds(
        Conv, widths, kernels, pairs(0, 2), st.booleans(), st.sampled_from(["", "before", "after", "after"])
    )
    batch = draw(st.integers(1, 13))
    case = Case(
        tuple(draw(st.lists(convolutions, min_size=1, max_size=4))),
        (*draw(st.lists(st.integers(1, 40), max_size=2)), draw(st.integers(1, 20))),
        draw(st.sampled_from([3, 1, 4])),
        draw(st.tuples(st.integers(5, 20), st.integers(5, 20))),
        batch,
        draw(st.just(batch) | st.integers(1, batch)),
        draw(st.booleans()),
    )
    while min(case.sides()) < 1:  # fewer layers always go through in the end
        shorter = case.convolutions[:-1] or (Conv(case.convolutions[0].outputs, pool=True),)
        case = Case(shorter, case.linear, case.channels, case.size, case.batch, case.count, case.relu)
    return case


@dataclass(frozen=True)
class Problem:
    """A chain with weights and images."""

    case: Case
    network: nn.Sequential  # float64, on the same numbers
    images: torch.Tensor  # bytes [n, h, w, c]
    labels: torch.Tensor
    unit: float = 1.0  # the outputs are multiples of it

    @cached_property
    def spec(self) -> ChainSpec:
        found = spec_of(self.case.network())
        assert found is not None
        return found

    @cached_property
    def inputs(self) -> torch.Tensor:
        return self.images.permute(0, 3, 1, 2).double() / 255

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().float() for name, value in self.network.named_parameters()}

    @cached_property
    def flat(self) -> torch.Tensor:
        """The parameters as the kernels take them."""
        return flattened(list(self.weights.values()))

    def checked(self) -> Images:
        return Images(self.images, labels=self.labels)

    def chain(self, way: int = AUTOMATIC, variant: Library | None = None) -> Chain:
        return Chain(self.spec, self.case.batch, self.case.size, way, variant)

    def chains(self) -> Iterator[tuple[str, Chain]]:
        """In every way, by every variant."""
        for (variant, calls), (way, number) in product(libraries().items(), WAYS.items()):
            yield f"{variant}, {way}", self.chain(number, calls)

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """torch's, in float64."""
        return list(torch.autograd.grad(loss, list(self.network.parameters())))

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """A flat vector of the kernels as torch's parameters."""
        found = []
        for value in self.network.parameters():
            part, vector = vector[: value.numel()], vector[value.numel() :]
            if value.dim() == 4:
                outputs, inputs, height, width = value.shape
                part = part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
            found.append(part.reshape(value.shape))
        assert not len(vector)
        return found


def flattened(values: list[torch.Tensor]) -> torch.Tensor:
    """torch's parameters as a flat vector of the kernels."""
    shaped = (value.permute(0, 2, 3, 1) if value.dim() == 4 else value for value in values)
    return torch.cat([value.detach().reshape(-1) for value in shaped]).contiguous()


def whole(case: Case, seed: int = 0, *, blocks: bool = False) -> Problem:
    """Whole numbers. `blocks`: images of constant patches, so that windows are full of ties."""
    rng = np.random.default_rng(seed)
    network, unit = case.network().double(), 1.0
    for layer in network:
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        outputs, fan_in = len(layer.weight), layer.weight[0].numel()
        used = min(fan_in, 24)
        numbers = rng.choice([-2, -1, 1, 2], (outputs, fan_in)) * (
            rng.random((outputs, fan_in)) < used / fan_in
        )
        scale = 2.0 ** -round(np.log2(1.5 * np.sqrt(used)))
        unit *= scale
        bias = rng.integers(-2, 3, outputs) * max(1, round(0.1 / unit)) * unit
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(numbers * scale).view(layer.weight.shape))
            layer.bias.copy_(torch.from_numpy(bias))
    height, width = case.size
    side = 3 if blocks else 1
    coarse = rng.integers(0, 2, (case.count, -(-height // side), -(-width // side), case.channels))
    fine = coarse.repeat(side, 1).repeat(side, 2)[:, :height, :width]
    images = torch.from_numpy((fine * 255).astype(np.uint8))
    labels = torch.from_numpy(rng.integers(0, case.linear[-1], case.count))
    return Problem(case, network, images, labels, unit)


def smooth(case: Case, seed: int = 0) -> Problem:
    """Any numbers, but such that no pool or ReLU hangs on rounding."""
    for number in count(seed):
        rng = np.random.default_rng(number)
        network = case.network().double()
        with torch.no_grad():
            for parameter in network.parameters():
                fan_in = parameter[0].numel() if parameter.dim() > 1 else 100
                drawn = rng.normal(size=tuple(parameter.shape)) * np.sqrt(2 / fan_in)
                parameter.copy_(torch.from_numpy(drawn.astype(np.float32).astype(np.float64)))
        images = torch.from_numpy(
            rng.integers(0, 256, (case.count, *case.size, case.channels), dtype=np.uint8)
        )
        labels = torch.from_numpy(rng.integers(0, case.linear[-1], case.count))
        problem = Problem(case, network, images, labels)
        if _clear(problem):
            return problem
        assert number < seed + 500, "no weights without a near tie: the case is too large"
    raise AssertionError


def _clear(problem: Problem) -> bool:
    """Whether all decisions are clear, or ties of equal patches."""
    x = problem.inputs
    with torch.no_grad():
        for layer in problem.network:
            margin = None
            if isinstance(layer, nn.ReLU):
                margin = x.abs()
            elif isinstance(layer, nn.MaxPool2d):
                height, width = (side // 2 * 2 for side in x.shape[2:])
                windows = x[:, :, :height, :width].unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
                best = windows.topk(2, -1).values
                margin = best[..., 0] - best[..., 1]
            if margin is not None and bool(((margin > 0) & (margin < 2e-6 * x.abs().max())).any()):
                return False
            x = layer(x)
    return True


def loss_of(problem: Problem) -> torch.Tensor:
    return F.cross_entropy(problem.network(problem.inputs), problem.labels)


def compare(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float, what: str) -> None:
    """Every tensor, relative to its largest number."""
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.shape == theirs.shape
        error, largest = float((mine.double() - theirs).abs().max()), float(theirs.abs().max())
        assert error <= tolerance * largest, f"{what}: tensor {place} differs by {error:.2e} of {largest:.2e}"
