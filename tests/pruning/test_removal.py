"""From rates to a smaller network: thresholds, ranks, which filters can go, and their removal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from feddumap import models
from feddumap.core.messages import Architecture, ServerState, Tensors
from feddumap.errors import FeddumapError
from feddumap.models.cost import parameter_names
from feddumap.pruning import ranks
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.ranks import feature_ranks
from feddumap.pruning.rates import layer_rates, lowest_ranked, node_weights, threshold
from feddumap.pruning.removal import PruningPlan, plan
from feddumap.training.backends import Kernels, make_model
from feddumap.training.samples import Samples, to_input
from feddumap.training.torch_model import TorchModel
from tests.conftest import both_kernels

pytestmark = pytest.mark.usefixtures("one_thread")


# --- networks that users might bring --------------------------------------------------------------------


class Forked(nn.Module):
    """Two branches, concatenated and normalised together."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 6, 3, padding=1)
        self.right = nn.Conv2d(3, 5, 1)
        self.norm = nn.BatchNorm2d(11)
        self.last = nn.Conv2d(11, 4, 3, stride=4)
        self.fc = nn.Linear(4 * 8 * 8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(torch.cat([self.left(x), self.right(x)], dim=1)))
        return self.fc(F.relu(self.last(x)).flatten(1))


class Inverted(nn.Module):
    """An inverted residual: expand, depthwise, project, add; batch norm behind each."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.expand, self.norm1 = nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depthwise, self.norm2 = nn.Conv2d(12, 12, 3, 1, 1, groups=12), nn.BatchNorm2d(12)
        self.project, self.norm3 = nn.Conv2d(12, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        y = F.relu(self.norm2(self.depthwise(F.relu(self.norm1(self.expand(x))))))
        x = F.relu(x + self.norm3(self.project(y)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def pooled(classes: int) -> nn.Module:
    """Adaptive pooling and two linear layers."""
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, classes))
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 10, 3), nn.ReLU(), *head)


def stubborn(classes: int) -> nn.Module:
    """Nothing here can go: two groups in the middle, the outputs at the end."""
    middle = nn.Conv2d(8, 8, 3, groups=2)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), middle, nn.ReLU(), nn.Conv2d(8, classes, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


for name, factory in {"forked": Forked, "inverted": Inverted, "pooled": pooled, "stubborn": stubborn}.items():
    models.register(f"test-pruning-{name}", factory)


def narrow(family: str, divisor: int, least: int = 4) -> Architecture:
    full = models.architecture(family, 10)
    widths = tuple((name, max(width // divisor, least)) for name, width in full.channels)
    return replace(full, channels=widths)


Readers = dict[str, list[tuple[str, int, int]]]
"""For each layer's leader, who reads its channels: (module, first input, inputs a channel)."""


@dataclass(frozen=True)
class Case:
    architecture: Architecture
    readers: Readers
    tied: dict[str, list[str]]
    """Other convolutions that lose the same channels."""


def chain(family: str, divisor: int, side: int) -> Case:
    given = narrow(family, divisor)
    count = len(given.channels)
    readers: Readers = {f"conv{i}": [(f"conv{i + 1}", 0, 1)] for i in range(1, count)}
    return Case(given, readers | {f"conv{count}": [("fc1", 0, side**2)]}, {})


def residual() -> Case:
    """ResNet18 by hand: a block's first convolution is read by its second; a stage's sums by the blocks that
    follow, and the next stage's first block with its projection."""
    stages = [f"stage{i}" for i in (1, 2, 3, 4)]
    readers: Readers = {f"{s}.{b}.conv1": [(f"{s}.{b}.conv2", 0, 1)] for s in stages for b in (0, 1)}
    tied = {"stem": ["stage1.0.conv2", "stage1.1.conv2"]}
    tied |= {f"{s}.0.conv2": [f"{s}.1.conv2", f"{s}.0.projection"] for s in stages[1:]}
    for leader, stage, following in zip(tied, stages, [*stages[1:], None], strict=True):
        after = [f"{following}.0.conv1", f"{following}.0.projection"] if following else ["fc"]
        inner = [f"{stage}.1.conv1"] + ([f"{stage}.0.conv1"] if leader == "stem" else [])
        readers[leader] = [(reader, 0, 1) for reader in inner + after]
    # 16 are left of 24: on CPUs, torch trains strided 1×1 convolutions of fewer inputs wrongly (oneDNN #6035)
    return Case(narrow("resnet18", 16, least=24), readers, tied)


def own(name: str, readers: Readers, tied: dict[str, list[str]] | None = None) -> Case:
    return Case(models.architecture(f"test-pruning-{name}", 10), readers, tied or {})


CASES = {
    "lenet": chain("lenet", 1, 5),
    "cnn": chain("cnn", 4, 4),
    "vgg11": chain("vgg11", 16, 1),
    "resnet18": residual(),
    "forked": own("forked", {"left": [("last", 0, 1)], "right": [("last", 6, 1)], "last": [("fc", 0, 64)]}),
    "inverted": own(
        "inverted",
        {"stem": [("expand", 0, 1), ("fc", 0, 1)], "expand": [("project", 0, 1)]},
        {"stem": ["project"], "expand": ["depthwise"]},
    ),
    "pooled": own("pooled", {"0": [("2", 0, 1)], "2": [("6", 0, 4)]}),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def some_weights(given: Architecture) -> Tensors:
    """Random everywhere, batch norm's statistics and counters too."""
    rng = torch.Generator().manual_seed(1)
    weights = models.initialise(given, 3)
    for name, tensor in weights.items():
        if tensor.dim() == 1:
            offset = 1.5 if name.endswith("running_var") else 0.0
            weights[name] = offset + torch.rand(tensor.shape, generator=rng) - 0.4
        elif not tensor.is_floating_point():
            weights[name] = torch.tensor(17)
    return weights


def some_drop(given: Architecture, leaders: Readers) -> dict[str, list[int]]:
    """About a third of each layer's channels, and not the same ones in each."""
    rng = np.random.default_rng(0)
    widths = given.widths
    return {n: sorted(rng.choice(widths[n], widths[n] // 3, replace=False).tolist()) for n in leaders}


def masked(weights: Tensors, readers: Readers, drop: dict[str, list[int]]) -> Tensors:
    """The same network in which nobody listens to the dropped channels."""
    result = {name: tensor.clone() for name, tensor in weights.items()}
    for leader, channels in drop.items():
        for reader, offset, spread in readers[leader]:
            for channel in channels:
                start = (offset + channel) * spread if spread > 1 else offset + channel
                result[f"{reader}.weight"][:, start : start + spread] = 0
    return result


def images(count: int = 3) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


# --- removal --------------------------------------------------------------------------------------------


def cut_of(case: Case) -> tuple[dict[str, list[int]], PruningPlan]:
    drop = some_drop(case.architecture, case.readers)
    return drop, plan(case.architecture, drop)


@cases
def test_the_cut_network_equals_the_masked_one(case: Case) -> None:
    drop, cut = cut_of(case)
    weights = some_weights(case.architecture)
    full = models.network(case.architecture, weights)
    mask = models.network(case.architecture, masked(weights, case.readers, drop))
    small = models.network(cut.architecture, cut.apply(weights))
    with torch.no_grad():
        expected = mask.eval()(images())
        torch.testing.assert_close(small.eval()(images()), expected, rtol=1e-5, atol=1e-5)
        assert float((full.eval()(images()) - expected).abs().max()) > 1e-3  # the channels did matter
    torch.testing.assert_close(small.train()(images()), mask.train()(images()), rtol=1e-5, atol=1e-5)
    F.cross_entropy(small(images()), torch.tensor([1, 0, 2])).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    F.cross_entropy(mask(images()), torch.tensor([1, 0, 2])).backward()
    gradients = {name: p.grad for name, p in mask.named_parameters() if p.grad is not None}
    for name, expected in cut.apply(gradients).items():
        torch.testing.assert_close(small.get_parameter(name).grad, expected, rtol=1e-3, atol=1e-5)


@cases
def test_widths_parameters_and_macs_fall_as_counted(case: Case) -> None:
    drop, cut = cut_of(case)
    expected = dict(case.architecture.widths)
    for leader, channels in drop.items():
        for convolution in [leader, *case.tied.get(leader, [])]:
            expected[convolution] -= len(channels)
    assert cut.architecture == replace(case.architecture, channels=tuple(expected.items()))
    left = cut.apply(some_weights(case.architecture))
    names = parameter_names(case.architecture)
    assert models.parameters(cut.architecture) == sum(left[name].numel() for name in names)
    assert models.parameters(cut.architecture) < models.parameters(case.architecture)
    counted = 0

    def count(module: nn.Module, _: object, output: torch.Tensor) -> None:
        nonlocal counted
        counted += output[0].numel() * module.weight[0].numel()  # type: ignore[index, operator]

    small = models.network(cut.architecture, left)
    for module in small.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    small.eval()(images(1))
    assert models.macs(cut.architecture) == counted < models.macs(case.architecture)


def test_everything_of_a_parameters_shape_is_cut_alike() -> None:
    case = CASES["resnet18"]
    drop, cut = cut_of(case)
    weights = some_weights(case.architecture)
    names = parameter_names(case.architecture)
    steps = {f"1/momentum/{name}": weights[name] * 2 for name in names}
    state = ServerState(
        4, case.architecture, weights, clock=9.0,
        steps=steps
        | {"0/best": torch.tensor(0.5), "0/grid": torch.arange(3), f"0/{names[0]}": torch.arange(3)},
        mask={name: weights[name] > 0 for name in names},
    )  # fmt: skip
    after = cut.state(state)
    for name in names:
        assert torch.equal(after.steps[f"1/momentum/{name}"], after.weights[name] * 2)
        assert torch.equal(after.mask[name], after.weights[name] > 0)
    assert after.steps["0/best"] == 0.5
    assert after.steps["0/grid"].tolist() == [0, 1, 2]
    assert after.steps[f"0/{names[0]}"].tolist() == [0, 1, 2], "no tensor of that parameter's shape"
    assert (after.round, after.clock) == (4, 9.0)
    block = "stage2.0"
    inner = [c for c in range(case.architecture.widths[f"{block}.conv1"]) if c not in drop[f"{block}.conv1"]]
    inputs = [c for c in range(case.architecture.widths["stem"]) if c not in drop["stem"]]
    expected = weights[f"{block}.conv1.weight"][inner][:, inputs]
    assert torch.equal(after.weights[f"{block}.conv1.weight"], expected)  # in the old order
    for buffer in ("running_mean", "running_var", "weight", "bias"):
        name = f"{block}.norm1.{buffer}"
        assert torch.equal(after.weights[name], weights[name][inner])
    counter = after.weights[f"{block}.norm1.num_batches_tracked"]
    assert (counter.dtype, int(counter)) == (torch.int64, 17)
    assert state.weights is weights, "the state before is left as it was"
    assert all(torch.equal(weights[name], tensor) for name, tensor in some_weights(case.architecture).items())


def test_a_lenet_counted_by_hand() -> None:
    lenet = models.architecture("lenet", 10)
    cut = plan(lenet, {"conv1": [0, 5], "conv2": [3, 4, 5]})
    assert cut.architecture.widths == {"conv1": 4, "conv2": 13}
    linear = 13 * 25 * 120 + 120 * 84 + 84 * 10
    assert models.macs(cut.architecture) == 28 * 28 * 75 * 4 + 10 * 10 * 25 * 4 * 13 + linear
    assert models.parameters(cut.architecture) == 76 * 4 + 101 * 13 + linear + 120 + 84 + 10
    assert plan(lenet, {"conv1": [], "conv2": []}).architecture == lenet


# --- what can be pruned ---------------------------------------------------------------------------------


@cases
def test_layers_that_can_be_pruned(case: Case) -> None:
    found = prunable(case.architecture)
    assert found.refused == {}
    groups = {layer.leader: {*layer.members[1:], *layer.followers} for layer in found.layers}
    assert groups == {leader: set(case.tied.get(leader, ())) for leader in case.readers}
    free = {layer.leader for layer in found.choose(coupled=False)}
    assert free == {layer.leader for layer in found.layers if len(layer.members) == 1}
    assert {layer.leader for layer in found.choose(coupled=True)} == set(case.readers)


def test_resnet_prunes_first_convolutions_unless_coupled() -> None:
    found = prunable(CASES["resnet18"].architecture)
    expected = [f"stage{stage}.{block}.conv1" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert [layer.leader for layer in found.choose(coupled=False)] == expected
    assert len(found.choose(coupled=True)) == 8 + 4
    stem = next(layer for layer in found.layers if layer.leader == "stem")
    norms = {"stem": "stem_norm", "stage1.0.conv2": "stage1.0.norm2", "stage1.1.conv2": "stage1.1.norm2"}
    assert dict(zip(stem.members, stem.features, strict=True)) == norms


def test_depthwise_convolutions_follow() -> None:
    expand = prunable(CASES["inverted"].architecture).choose(coupled=False)[0]
    assert (expand.members, expand.followers, expand.features) == (("expand",), ("depthwise",), ("norm1",))


def test_what_cannot_be_pruned_is_named_with_the_reason() -> None:
    found = prunable(models.architecture("test-pruning-stubborn", 10))
    assert found.layers == ()
    assert found.refused == {
        "0": "its channels run through 2, which has 2 groups",
        "2": "it has 2 groups",
        "4": "its channels are the network's outputs",
    }
    sentence = r"no convolution of this network can be pruned \(0: its .*2 groups; 2: it has 2 groups; 4: its"
    for coupled in (False, True):
        with pytest.raises(FeddumapError, match=sentence):
            found.choose(coupled=coupled)
    with pytest.raises(FeddumapError, match=r"test-pruning-stubborn cannot be pruned: .*number of outputs"):
        plan(models.architecture("test-pruning-stubborn", 10), {"4": [1]})


# --- one rate for all, one for each layer ---------------------------------------------------------------

sizes = st.lists(st.integers(1, 10_000), min_size=2, max_size=20)


@settings(max_examples=50, deadline=None)
@given(sizes, st.integers(0, 10**6), st.floats(0, 1))
def test_nodes_are_weighted_by_samples_and_degree(samples: list[int], seed: int, rate: float) -> None:
    degrees = np.random.default_rng(seed).uniform(0, 1, len(samples))
    weights = node_weights(samples, degrees)
    raw = [n / (d + 1e-4) for n, d in zip(samples, degrees, strict=True)]
    assert weights == pytest.approx(np.array(raw) / sum(raw))
    assert weights.sum() == pytest.approx(1)
    assert float(weights @ np.full(len(samples), rate)) == pytest.approx(rate)  # equal p_k: p* = p
    further = degrees.copy()
    further[0] += 0.1
    assert node_weights(samples, further)[0] < weights[0]
    assert node_weights([samples[0] * 2, *samples[1:]], degrees)[0] > weights[0]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_threshold_and_layer_rates(seed: int, one: float, other: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (4, 3, 3, 3), "a.bias": (4,), "b.weight": (5, 4, 1, 1), "fc.weight": (7, 5)}
    weights = {n: torch.randn(s, generator=rng).round(decimals=1) for n, s in shapes.items()}  # with ties
    weights["a.running_mean"] = torch.full((4,), 1e-9)  # is no parameter
    scalars = sorted(abs(v) for name in shapes for v in weights[name].flatten().tolist())
    layers = {"a": ["a"], "ab": ["a", "b"]}
    found = []
    for rate in sorted((one, other)):
        limit = threshold(weights, list(shapes), rate)
        place = int(len(scalars) * rate)
        assert limit == (scalars[place - 1] if place else 0)
        assert sum(value < limit for value in scalars) <= rate * len(scalars)
        rates = layer_rates(weights, layers, limit)
        both = torch.cat([weights["a.weight"].flatten(), weights["b.weight"].flatten()]).tolist()
        assert rates["a"] == np.mean([abs(v) < limit for v in weights["a.weight"].flatten().tolist()])
        assert rates["ab"] == pytest.approx(np.mean([abs(v) < limit for v in both]))
        found.append(rates)
    assert all(found[0][name] <= found[1][name] for name in layers)
    assert threshold(weights, list(shapes), 0.0) == 0
    assert layer_rates(weights, layers, 0.0) == {"a": 0, "ab": 0}


def test_the_filters_of_lowest_rank_go() -> None:
    assert lowest_ranked(0.25, [5.0, 4.0, 0.0, 3.0]) == [2]  # a dead filter first
    assert lowest_ranked(0.5, [2.0, 1.0, 2.0, 2.0]) == [0, 1]  # of equals the first
    assert lowest_ranked(0.75, [9.0, 3.0, 5.0, 1.0]) == [1, 2, 3]  # ascending, whatever the ranks
    assert lowest_ranked(1.0, [3.0, 2.0, 1.0]) == [1, 2]  # one stays: the best
    assert lowest_ranked(1.0, [3.0]) == []
    assert lowest_ranked(0.0, [0.0, 0.0]) == []
    assert lowest_ranked(0.49, [1.0, 1.0]) == []  # ⌊0.98⌋
    assert len(lowest_ranked(0.29, [1.0] * 100)) == 29  # 0.29 · 100 is 28.999… in floats


# --- ranks ----------------------------------------------------------------------------------------------


def pictures(count: int) -> Samples:
    """Squares of several sizes: maps of low and of high rank."""
    rng = np.random.default_rng(0)
    coarse = [rng.integers(0, 256, (2 << i % 4, 2 << i % 4, 3), dtype=np.uint8) for i in range(count)]
    fine = np.stack([image.repeat(32 // len(image), 0).repeat(32 // len(image), 1) for image in coarse])
    return Samples(torch.from_numpy(fine), torch.zeros(count, dtype=torch.int64))


@both_kernels
def test_ranks_equal_a_plain_loop(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    lenet = models.architecture("lenet", 10)
    weights = models.initialise(lenet, 0)
    weights["conv1.weight"][2] = 0
    weights["conv1.bias"][2] = -1.0  # after ReLU nothing is left of it
    layers, data = prunable(lenet).choose(coupled=False), pictures(7)
    expected = {"conv1": np.zeros(6), "conv2": np.zeros(16)}
    for image in data.inputs:
        x = to_input(image[None])
        for name, total in expected.items():
            maps = F.relu(F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
            total += [np.linalg.matrix_rank(one) for one in maps[0].numpy()]
            x = F.max_pool2d(maps, 2)
    model = make_model(lenet, weights, kernels)
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(ranks, "CHUNK", 3)
    found = feature_ranks(model, layers, data, lambda *tick: said.append(tick))
    assert said == [(3, 7), (6, 7), (7, 7)]
    for name, total in expected.items():
        assert found[name] == pytest.approx(total / 7)
        assert len(set(found[name])) > 3
    assert found["conv1"][2] == 0
    assert lowest_ranked(0.2, found["conv1"]) == [2]
    monkeypatch.setattr(ranks, "CHUNK", 50)
    assert feature_ranks(model, layers, data, lambda *_: None) == found
    monkeypatch.setattr(ranks, "IMAGES", 4)  # at most so many
    four = data[:4]
    few = feature_ranks(model, layers, data, lambda *_: None)
    assert few == feature_ranks(model, layers, four, lambda *_: None) != found
    if isinstance(model, TorchModel):
        assert not model.network.get_submodule("conv1")._forward_hooks


def test_ranks_are_taken_behind_batch_norm() -> None:
    given = CASES["resnet18"].architecture
    weights = models.initialise(given, 0)
    layers = prunable(given).choose(coupled=True)
    before = feature_ranks(models.network(given, weights), layers, pictures(2), lambda *_: None)
    weights["stage1.0.norm1.bias"][1] = -100.0  # the convolution itself is as alive as before
    weights["stage1.1.norm2.bias"][3] = -100.0
    after = feature_ranks(models.network(given, weights), layers, pictures(2), lambda *_: None)
    assert before["stage1.0.conv1"][1] > 0
    assert after["stage1.0.conv1"][1] == 0
    # channels that convolutions share take the mean of their ranks, so one dead member does not decide
    assert 0 < after["stem"][3] < before["stem"][3]
