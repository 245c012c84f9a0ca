"""Networks are data: counted exactly, rebuilt at any width, drawn from a stream, cut by torch-pruning."""

import json
import math
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddumap import models
from feddumap.core.messages import Architecture
from feddumap.errors import FeddumapError
from feddumap.models import cost

FAMILIES = ("cnn", "lenet", "vgg11", "resnet18")

# family, classes, trainable scalars, multiply-adds on 1×3×32×32
COSTS = [
    ("cnn", 10, 122_570, 4_548_608),
    ("cnn", 100, 128_420, 4_554_368),
    ("lenet", 10, 62_006, 651_720),
    ("lenet", 100, 69_656, 659_280),
    ("vgg11", 10, 9_750_922, 153_293_824),
    ("vgg11", 100, 9_797_092, 153_339_904),
    ("resnet18", 10, 11_178_762, 555_422_720),
    ("resnet18", 100, 11_224_932, 555_468_800),
]


class Forked(nn.Module):
    """Two branches, concatenated, a depthwise convolution over both (defined first), a layer and a scale."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(14, 14, 3, padding=1, groups=14)
        self.left = nn.Conv2d(3, 8, 3, padding=1)
        self.right = nn.Conv2d(3, 6, 1)
        self.norm = nn.BatchNorm2d(14)
        self.last = nn.Conv2d(14, 5, 3, stride=2, bias=False)
        self.fc = nn.Linear(5 * 15 * 15, classes)
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("constant", torch.tensor([0.5]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.left(x), self.right(x)], dim=1)
        x = F.relu(self.norm(self.depthwise(x)))
        return self.fc(self.last(x).flatten(1)) * self.scale + self.constant


@pytest.fixture
def forked() -> Architecture:
    models.register("test-forked", Forked)
    return models.architecture("test-forked", 7)


def resized(full: Architecture, change: dict[str, int]) -> Architecture:
    return replace(full, channels=tuple((full.widths | change).items()))


def narrow(family: str, classes: int = 10) -> Architecture:
    """Every convolution about a third narrower, unevenly; layers that residual sums tie agree."""
    full = models.architecture(family, classes)

    def width(i: int, name: str, channels: int) -> int:
        free = family != "resnet18" or name.endswith("conv1")
        return channels * 2 // 3 - (i % 3 if free else 0)

    return replace(full, channels=tuple((n, width(i, n, c)) for i, (n, c) in enumerate(full.channels)))


def images(batch: int = 2) -> torch.Tensor:
    return torch.rand(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("family", "classes", "parameters", "macs"), COSTS)
def test_costs_are_exact(family: str, classes: int, parameters: int, macs: int) -> None:
    full = models.architecture(family, classes)
    assert models.parameters(full) == parameters
    assert models.macs(full) == macs == models.full_macs(full)
    table = models.layer_table(full)
    assert sum(row.parameters for row in table) == parameters
    assert sum(row.macs for row in table) == sum(models.layer_macs(full).values()) == macs


def test_layer_costs_by_hand() -> None:
    # conv2 of CNN sees 15×15 maps and is valid: 13×13 outputs of 64 channels, 3×3×32 multiply-adds each
    cnn = models.architecture("cnn", 10)
    assert models.layer_macs(cnn)["conv2"] == 13 * 13 * 64 * 3 * 3 * 32
    assert models.layer_table(cnn)[1] == ("conv2", "Conv2d", (64, 32, 3, 3), 64 * 32 * 9 + 64, 3_115_008)
    # the CNN that keeps (28, 46, 45) filters
    cut = resized(cnn, {"conv1": 28, "conv2": 46, "conv3": 45})
    by_hand = 30 * 30 * 28 * 27 + 13 * 13 * 46 * 9 * 28 + 4 * 4 * 45 * 9 * 46 + 45 * 16 * 64 + 64 * 10
    assert models.macs(cut) == by_hand == 2_984_248
    assert models.full_macs(cut) == models.macs(cnn)


@pytest.mark.parametrize("family", FAMILIES)
def test_channels_name_every_convolution_in_order(family: str) -> None:
    full = models.architecture(family, 10)
    network = models.build(full)
    convolutions = [(n, m.out_channels) for n, m in network.named_modules() if isinstance(m, nn.Conv2d)]
    assert list(full.channels) == convolutions == list(models.channels_of(network))
    assert len(full.channels) == {"cnn": 3, "lenet": 2, "vgg11": 8, "resnet18": 1 + 8 * 2 + 3}[family]


def test_linear_inputs_follow_the_channels() -> None:
    for family, change, columns in [
        ("cnn", {"conv3": 5}, 80),
        ("lenet", {"conv2": 3}, 75),
        ("vgg11", {"conv8": 7}, 7),
    ]:
        network = models.build(resized(models.architecture(family, 10), change))
        assert network.get_submodule("fc1").in_features == columns


@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_networks_train(family: str) -> None:
    cut = narrow(family, classes=4)
    network = models.network(cut, models.initialise(cut, seed=3))
    assert models.channels_of(network) == cut.channels
    assert models.macs(cut) < models.full_macs(cut)
    logits = network(images())
    assert logits.shape == (2, 4)
    F.cross_entropy(logits, torch.tensor([0, 3])).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())
    assert all(p.grad.abs().sum() > 0 for n, p in network.named_parameters() if n.startswith("fc"))


@pytest.mark.parametrize("family", FAMILIES)
def test_architecture_survives_json(family: str) -> None:
    cut = narrow(family)
    assert Architecture.from_json(json.loads(json.dumps(cut.to_json()))) == cut


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_distribution(family: str) -> None:
    network = models.build(full := models.architecture(family, 100))
    weights = models.initialise(full, seed=5)
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            weight, variance = (
                weights[f"{name}.weight"],
                2 / (module.kernel_size[0] ** 2 * module.out_channels),
            )
            tolerance = 5 / math.sqrt(weight.numel())  # five standard errors, of the mean and of the variance
            assert abs(weight.mean()) < tolerance * math.sqrt(variance)
            assert abs(weight.var() / variance - 1) < tolerance * math.sqrt(2)
            assert not weights[f"{name}.bias"].any()
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            assert 0.9 * bound < weights[f"{name}.weight"].abs().max() <= bound
            assert 0 < weights[f"{name}.bias"].abs().max() <= bound
        elif isinstance(module, nn.BatchNorm2d):
            assert (weights[f"{name}.weight"] == 1).all()
            assert not weights[f"{name}.bias"].any()


@pytest.mark.parametrize("family", ["cnn", "resnet18"])
def test_the_seed_alone_decides(family: str) -> None:
    cut = narrow(family)
    first = models.initialise(cut, 1)
    torch.manual_seed(8)
    before = torch.get_rng_state()
    again, other = models.initialise(cut, 1), models.initialise(cut, 2)
    models.build(cut)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [n for n in first if n.endswith("weight") and "norm" not in n]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_pooling_before_relu_changes_nothing() -> None:
    full = models.architecture("cnn", 10)
    network = models.network(full, models.initialise(full, 0))
    usual: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in network.named_children():
        if name.startswith("pool"):
            usual[f"{name}_relu"] = nn.ReLU()
        usual[name] = layer if name not in ("relu1", "relu2") else nn.Identity()
    inputs = [images().requires_grad_() for _ in range(2)]
    ours, theirs = network(inputs[0]), nn.Sequential(usual)(inputs[1])
    assert [n for n, m in usual.items() if isinstance(m, nn.ReLU)][:2] == ["pool1_relu", "pool2_relu"]
    assert torch.equal(ours, theirs)
    gradients = [
        torch.autograd.grad(y.square().sum(), [x, *network.parameters()])
        for x, y in zip(inputs, (ours, theirs), strict=True)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_format_does_not_change_values(family: str) -> None:
    cut = narrow(family)
    weights = models.initialise(cut, 2)
    network = models.network(cut, weights).eval()
    plain = models.network(cut, {name: value.contiguous() for name, value in weights.items()}).eval()
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
            assert weights[f"{name}.weight"].is_contiguous(memory_format=torch.channels_last)
    plain = plain.to(memory_format=torch.contiguous_format)
    expected = plain(images())
    torch.testing.assert_close(network(images()), expected, rtol=1e-4, atol=1e-5)
    last = images().contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(network(last), expected, rtol=1e-4, atol=1e-5)


def test_a_channel_owns_a_block_of_columns() -> None:
    full = models.architecture("cnn", 10)
    network = models.network(full, models.initialise(full, 2))
    features = network[: list(dict(network.named_children())).index("flatten") + 1]
    with torch.no_grad():
        network.get_submodule("conv3").bias[7] = -1e6  # silences channel 7
    flat = features(images().contiguous(memory_format=torch.channels_last)).reshape(2, 64, 16)
    assert not flat[:, 7].any()
    assert flat[:, [6, 8]].any()


def test_batch_norm_is_ready_without_weights() -> None:
    network = models.build(models.architecture("resnet18", 10))
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 1 + 8 * 2 + 3
    for norm in norms:
        assert not norm.running_mean.any()
        assert (norm.running_var == 1).all()
        assert norm.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("cnn", {"conv9": 3}, "unknown cnn layer 'conv9'"),
        ("lenet", {"conv1": 0}, "conv1 needs at least one channel, not 0"),
        ("vgg11", {"conv4": -2}, "at least one channel"),
        ("resnet18", {"stem": 60}, "residual sums of resnet18's stage1.*stem=60"),
        ("resnet18", {"stage3.1.conv2": 200}, r"stage3\.1\.conv2=200"),
        ("resnet18", {"stage2.0.projection": 100}, r"stage2\.0\.projection=100"),
    ],
)
def test_impossible_channels(family: str, change: dict[str, int], message: str) -> None:
    wrong = resized(models.architecture(family, 10), change)
    for use in (models.build, models.macs, lambda a: models.initialise(a, 0)):
        with pytest.raises(FeddumapError, match=message):
            use(wrong)


def test_other_mistakes() -> None:
    cnn = models.architecture("cnn", 10)
    with pytest.raises(FeddumapError, match="needs the channels of conv2, conv3"):
        models.build(replace(cnn, channels=(("conv1", 32),)))
    with pytest.raises(FeddumapError, match="twice"):
        models.build(replace(cnn, channels=(("conv1", 3), *cnn.channels)))
    with pytest.raises(FeddumapError, match="did you mean 'resnet18'"):
        models.architecture("resnet", 10)
    with pytest.raises(FeddumapError, match="at least one class"):
        models.architecture("cnn", 0)
    weights = models.initialise(cnn, 0)
    with pytest.raises(FeddumapError, match=r"the tensor conv1\.bias is missing"):
        models.network(cnn, {name: value for name, value in weights.items() if name != "conv1.bias"})
    with pytest.raises(FeddumapError, match="a tensor extra, which the network does not have"):
        models.network(cnn, weights | {"extra": torch.zeros(1)})
    with pytest.raises(FeddumapError, match=r"conv1.weight has the shape \[32, 3, 3, 3\], expected"):
        models.network(narrow("cnn"), weights)


def test_weights_are_copied() -> None:
    lenet = models.architecture("lenet", 10)
    weights = models.initialise(lenet, 0)
    network = models.network(lenet, weights)
    with torch.no_grad():
        network.get_submodule("conv1").weight.zero_()
    assert weights["conv1.weight"].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_pruning_cuts_to_the_same_shapes(family: str) -> None:
    tp = pytest.importorskip("torch_pruning")
    full = models.architecture(family, 10)
    for name in [full.channels[0][0], full.channels[-3 if family == "resnet18" else -1][0]]:
        network = models.network(full, models.initialise(full, 0))
        graph = tp.DependencyGraph().build_dependency(network, example_inputs=images(1), verbose=False)
        layer = network.get_submodule(name)
        graph.get_pruning_group(layer, tp.prune_conv_out_channels, [0, 2, 3]).prune()
        cut = replace(full, channels=models.channels_of(network))
        assert cut.widths[name] == full.widths[name] - 3
        rebuilt = models.network(cut, network.state_dict())
        torch.testing.assert_close(rebuilt.eval()(images()), network.eval()(images()))


class TestRegistered:
    def test_full_width(self, forked: Architecture) -> None:
        assert forked.channels == (("depthwise", 14), ("left", 8), ("right", 6), ("last", 5))
        assert "test-forked" in models.families()
        weights = models.initialise(forked, 1)
        assert torch.equal(weights["scale"], models.initialise(forked, 1)["scale"])
        assert not torch.equal(weights["scale"], models.initialise(forked, 2)["scale"])
        assert models.network(forked, weights)(images()).shape == (2, 7)
        depthwise, right = 32 * 32 * 14 * 9, 32 * 32 * 6 * 3
        assert models.layer_macs(forked)["depthwise"] == depthwise
        assert models.layer_macs(forked)["right"] == right
        table = models.layer_table(forked)
        assert sum(row.parameters for row in table) == models.parameters(forked)

    def test_cut(self, forked: Architecture) -> None:
        tp = pytest.importorskip("torch_pruning")
        cut = resized(forked, {"depthwise": 9, "left": 6, "right": 3, "last": 4})
        for _ in range(2):  # the second comes from a copy
            network = models.network(cut, weights := models.initialise(cut, 1))
            assert models.channels_of(network) == cut.channels
            assert network.training
            assert network.norm.running_var.tolist() == [1.0] * 9
            assert network.constant.tolist() == [0.5]
            assert network.fc.in_features == 4 * 15 * 15
            assert all(weights[n].shape == p.shape for n, p in network.named_parameters())
            network(images()).sum().backward()
        assert models.build(cut).left.weight.data_ptr() != models.build(cut).left.weight.data_ptr()
        assert models.macs(cut) < models.full_macs(cut)
        # pruning other channels than the last ones gives weights that fit as well
        pruned = models.network(forked, models.initialise(forked, 1))
        graph = tp.DependencyGraph().build_dependency(pruned, example_inputs=images(1), verbose=False)
        for name, surplus in [("left", [0, 5]), ("right", [1, 2, 4]), ("last", [0])]:
            layer = pruned.get_submodule(name)
            graph.get_pruning_group(layer, tp.prune_conv_out_channels, surplus).prune()
        rebuilt = models.network(cut, pruned.state_dict())
        torch.testing.assert_close(rebuilt.eval()(images()), pruned.eval()(images()))

    def test_impossible_cuts(self, forked: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("torch_pruning")
        with pytest.raises(FeddumapError, match=r"depthwise=14.*leave depthwise=12"):
            models.build(resized(forked, {"left": 6}))
        with pytest.raises(FeddumapError, match="left has only 8 channels, not 9"):
            models.build(resized(forked, {"left": 9}))
        monkeypatch.setitem(sys.modules, "torch_pruning", None)
        with pytest.raises(FeddumapError, match="pip install torch-pruning"):
            models.build(resized(forked, {"left": 7, "depthwise": 13}))

    def test_hard_coded_sizes_and_outputs(self) -> None:
        pytest.importorskip("torch_pruning")

        class HardCoded(nn.Module):
            def __init__(self, classes: int) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3, stride=8)
                self.fc = nn.Linear(8 * 16, classes)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.fc(self.conv(x).reshape(len(x), 8 * 16))

        def head(classes: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(3, 8, 3, stride=8), nn.Conv2d(8, classes, 4), nn.Flatten())

        models.register("test-hard-coded", HardCoded)
        models.register("test-head", head)
        with pytest.raises(FeddumapError, match="cannot be reduced to conv=7"):
            models.build(resized(models.architecture("test-hard-coded", 10), {"conv": 7}))
        with pytest.raises(FeddumapError, match="would leave 9 of 10 outputs"):
            models.build(resized(models.architecture("test-head", 10), {"1": 9}))

    def test_a_name_stands_for_one_network(self, forked: Architecture) -> None:
        models.register(forked.family, Forked)
        for name in ("cnn", forked.family):
            with pytest.raises(FeddumapError, match="is already registered"):
                models.register(name, lambda classes: nn.Linear(3, classes))


@pytest.mark.slow
def test_small_strided_projections_train_without_corrupting_memory() -> None:
    """In a process of its own: where the guard is missing, the allocator ends it."""
    code = """
import torch
from torch import nn
from feddumap.models import architecture, initialise, network, register
register("projection", lambda classes: nn.Sequential(
    nn.Conv2d(3, 5, 3), nn.Conv2d(5, 16, 1, stride=2), nn.Flatten(), nn.Linear(16 * 15 * 15, classes)))
torch.set_num_threads(1)
shape = architecture("projection", 10)
model = network(shape, initialise(shape, 0))
for _ in range(100):
    x = torch.randn(10, 3, 32, 32).to(memory_format=torch.channels_last)
    torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("name", models.families()[:4])
def test_multiply_adds_are_those_that_torch_counts(name: str) -> None:
    full = models.architecture(name, 10)
    narrow = replace(full, channels=tuple((layer, width - width // 3) for layer, width in full.channels))
    for shape in (full, narrow):
        total, layers = cost._operations(models.build(shape), shape.input.example())
        assert models.macs(shape) == total
        assert list(models.layer_macs(shape).items()) == list(layers.items())
