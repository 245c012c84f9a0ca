"""Cuts of many kinds of networks: what can be cut, why not, and that the cut network computes the same as the
whole one with those units zeroed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddumap import models
from feddumap.core.messages import Architecture, ServerState, Tensors
from feddumap.errors import FeddumapError
from feddumap.models.cost import parameter_names
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.ranks import feature_ranks, unit_ranks
from feddumap.pruning.removal import PruningPlan, plan
from feddumap.pruning.verification import check_cut
from feddumap.training.samples import Samples
from tests.support.prunable_networks import CASES, Case, Readers

pytestmark = pytest.mark.usefixtures("one_thread")
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
cuttable = pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.readers], ids=[n for n, c in CASES.items() if c.readers]
)


def some_weights(given: Architecture) -> Tensors:
    """Random everywhere, in float64."""
    rng = torch.Generator().manual_seed(5)
    weights = {}
    for name, tensor in models.initialise(given, 3).items():
        offset = 1.0 if name.endswith("running_var") else -0.5
        drawn = offset + torch.rand(tensor.shape, generator=rng, dtype=torch.float64)
        weights[name] = drawn if tensor.is_floating_point() else tensor
    module = models.build(given).double()
    models.load_state(module, weights)
    return models.state_of(module)


def some_drop(given: Architecture, readers: Readers) -> dict[str, list[int]]:
    """About 40 % of each layer's units, and not the same ones in each."""
    rng = np.random.default_rng(1)
    widths = models.layer_widths(given)
    return {n: sorted(rng.choice(widths[n], int(widths[n] * 0.4), replace=False).tolist()) for n in readers}


def plain_norms(network: nn.Module) -> nn.Module:
    """Norms over all units apply weight and bias only: the stated exemption."""

    def affine(module: nn.Module, inputs: tuple[torch.Tensor], output: object) -> torch.Tensor:
        shape = [-1, 1, 1] if isinstance(module, nn.GroupNorm) else [-1]
        bias = getattr(module, "bias", None)
        weighted = inputs[0] * module.weight.view(shape)  # type: ignore[operator]
        return weighted if bias is None else weighted + bias.view(shape)

    for module in network.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
            module.register_forward_hook(affine)
    return network


def zeroed(network: nn.Module, readers: Readers, drop: dict[str, list[int]]) -> nn.Module:
    """Whoever reads the dropped units finds zeros."""

    def hook(offset: int, spread: int, units: list[int]):  # type: ignore[no-untyped-def]
        def silence(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            x = inputs[0].clone()
            for unit in units:
                start = offset + unit * spread
                if isinstance(module, nn.Linear):
                    x[..., start : start + spread] = 0
                else:
                    x[:, start : start + spread] = 0
            return (x,)

        return silence

    for leader, units in drop.items():
        for reader, offset, spread in readers[leader]:
            network.get_submodule(reader).register_forward_pre_hook(hook(offset, spread, units))
    return network


def inputs_of(case: Case) -> torch.Tensor:
    drawn = case.input.random(3, torch.Generator().manual_seed(0))
    return drawn.double() if drawn.is_floating_point() else drawn


def network_of(given: Architecture, weights: Tensors) -> nn.Module:
    return models.network(given, {n: t.clone() for n, t in weights.items()}).double()


@cache
def cut_named(name: str) -> tuple[dict[str, list[int]], PruningPlan]:
    case = CASES[name]
    drop = some_drop(case.architecture, case.readers)
    return drop, plan(case.architecture, drop)


def cut_of(case: Case) -> tuple[dict[str, list[int]], PruningPlan]:
    return cut_named(next(name for name, other in CASES.items() if other is case))


@cases
def test_what_can_be_cut_and_why_not(case: Case) -> None:
    found = prunable(case.architecture, "all")
    groups = {layer.leader: {*layer.members[1:], *layer.followers} for layer in found.layers}
    assert groups == {leader: case.tied.get(leader, set()) for leader in case.readers}
    assert found.refused.keys() == case.refused.keys()
    for name, reason in case.refused.items():
        assert re.search(reason, found.refused[name]), found.refused[name]


@cuttable
def test_the_cut_network_is_the_whole_one_with_units_zeroed(case: Case) -> None:
    given = case.architecture
    weights = some_weights(given)
    drop, cut = cut_of(case)
    with torch.no_grad():
        whole = plain_norms(network_of(given, weights)).eval()
        full = whole(inputs_of(case))
        expected = zeroed(whole, case.readers, drop)(inputs_of(case))
        small = plain_norms(network_of(cut.architecture, cut.apply(weights))).eval()
        torch.testing.assert_close(small(inputs_of(case)), expected, rtol=1e-9, atol=1e-9)
    assert float((full - expected).abs().max()) > 1e-3  # the units did matter


@cuttable
def test_the_cut_network_trains_and_its_momentum_fits(case: Case) -> None:
    given = case.architecture
    _, cut = cut_of(case)
    names = parameter_names(given)
    weights = {name: t.float() if t.is_floating_point() else t for name, t in some_weights(given).items()}
    state = ServerState(3, given, weights, steps={f"1/momentum/{name}": weights[name] * 2 for name in names})
    after = cut.state(state)
    small = models.network(after.architecture, after.weights).train()
    for name, parameter in models.trainable(small).items():
        assert torch.equal(after.steps[f"1/momentum/{name}"], parameter.detach() * 2)
    outputs = small(case.input.random(3, torch.Generator().manual_seed(0)))
    F.cross_entropy(outputs, torch.tensor([1, 0, 2])).backward()
    trained = models.network(given, weights)
    for name, parameter in small.named_parameters():
        assert parameter.requires_grad == trained.get_parameter(name).requires_grad
        if parameter.requires_grad and "spare" not in name:
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape


@cuttable
def test_an_architecture_as_json_rebuilds_the_cut_network(case: Case) -> None:
    given = case.architecture
    drop, cut = cut_of(case)
    again = Architecture.from_json(json.loads(json.dumps(cut.architecture.to_json())))
    assert again == cut.architecture
    shapes = {name: tensor.shape for name, tensor in models.state_of(models.build(again)).items()}
    assert shapes == {name: tensor.shape for name, tensor in cut.apply(some_weights(given)).items()}
    lost: dict[str, int] = {}
    for leader, units in drop.items():
        for name in {leader, *case.tied.get(leader, ())}:
            lost[name] = lost.get(name, 0) + len(units)
    full = models.layer_widths(given)
    assert models.layer_widths(again) == {name: width - lost.get(name, 0) for name, width in full.items()}
    # 2-d convolutions always, other layers once they are narrowed
    listed = [name for name in full if name in lost or isinstance(_layer(given, name), nn.Conv2d)]
    assert [name for name, _ in again.channels] == listed
    assert models.parameters(again) < models.parameters(given)
    assert models.macs(again) < models.macs(given)


def _layer(given: Architecture, name: str) -> nn.Module:
    return models.build(given).get_submodule(name)


@pytest.mark.parametrize("name", ["plain", "residual", "convnext", "perceptron", "unet"])
def test_a_wrong_cut_is_found(name: str) -> None:
    """The next layer loses other inputs than those of the removed units."""
    case = CASES[name]
    drop, cut = cut_of(case)
    check_cut(case.architecture, cut)
    leader = next(iter(case.readers))
    reader = case.readers[leader][-1][0]
    moved = cut.kept[f"{reader}.weight"].roll(1, 0 if reader == "up" else 1)
    wrong = replace(cut, kept={**cut.kept, f"{reader}.weight": moved})
    with pytest.raises(FeddumapError, match="cannot be pruned as planned: a cut network computes something"):
        check_cut(case.architecture, wrong)
    assert drop


def test_filters_are_all_that_is_cut_by_default() -> None:
    case = CASES["squeeze-excitation"]
    found = prunable(case.architecture)
    assert [layer.leader for layer in found.layers] == ["stem", "conv"]
    assert [layer.leader for layer in found.choose(coupled=False)] == ["stem"]
    everything = prunable(case.architecture, "all").choose(coupled=True)
    assert [layer.leader for layer in everything] == ["stem", "conv", "squeeze"]


def test_built_in_networks_lose_hidden_units_too() -> None:
    lenet = models.architecture("lenet", 10)
    found = prunable(lenet, "all")
    assert [layer.leader for layer in found.layers] == ["conv1", "conv2", "fc1", "fc2"]
    cut = plan(lenet, {"conv2": [1], "fc1": list(range(20)), "fc2": [3, 5]})
    assert cut.architecture.channels == (("conv1", 6), ("conv2", 15), ("fc1", 100), ("fc2", 82))
    check_cut(lenet, cut)
    linear = 15 * 25 * 100 + 100 * 82 + 82 * 10
    assert models.macs(cut.architecture) == 28 * 28 * 75 * 6 + 10 * 10 * 25 * 6 * 15 + linear
    assert models.parameters(cut.architecture) == 76 * 6 + 151 * 15 + linear + 100 + 82 + 10
    # what has not been narrowed is not listed, as in the files of older versions
    assert plan(lenet, {"conv1": [0]}).architecture.channels == (("conv1", 5), ("conv2", 16))


def test_layers_are_protected_by_name() -> None:
    case = CASES["residual"]
    found = prunable(case.architecture, "all")
    assert [layer.leader for layer in found.choose(coupled=True, keep=["conv[2-9]"])] == ["conv1"]
    assert found.left_out(coupled=True, keep=["conv2"]) == {
        "stem": "method.keep names conv2",
        "conv2": "method.keep names conv2",
        "fc": "its units are the network's outputs",
    }
    with pytest.raises(FeddumapError, match=r"'head\.\*', which matches no layer: .*stem, conv1, conv2, fc"):
        found.choose(coupled=True, keep=["fc", "head.*"])


def test_the_error_names_every_layer_and_the_remedies() -> None:
    with pytest.raises(FeddumapError) as raised:
        prunable(CASES["residual"].architecture).choose(coupled=False, keep=["conv1"])
    assert str(raised.value) == (
        "no convolution of this network can be pruned (stem, conv2: stem, conv2 share channels; conv1: "
        "method.keep names conv1); use a method without pruning, or set method.coupled=true to prune those "
        "that share channels"
    )
    with pytest.raises(FeddumapError) as raised:
        prunable(CASES["perceptron"].architecture).choose(coupled=True)
    assert str(raised.value) == (
        "no convolution of this network can be pruned (it has none); use a method without pruning, or set "
        "method.units=all to cut hidden units of 0, 3"
    )


# --- ranks of units without maps --------------------------------------------------------------------------


def samples_of(case: Case, count: int) -> Samples:
    drawn = case.input.random(count, torch.Generator().manual_seed(4))
    return Samples(drawn, torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "layer", "feature"),
    [
        ("perceptron", "0", "1"),  # behind batch norm
        ("perceptron", "3", "3"),
        ("attention", "inner", "inner"),
        ("encoder-layer", "layer.linear1", "layer.linear1"),
        ("signal", "0", "1"),
    ],
)
def test_units_without_maps_are_ranked_by_mean_activation(name: str, layer: str, feature: str) -> None:
    case = CASES[name]
    given = case.architecture
    weights = {n: t.float() if t.is_floating_point() else t for n, t in some_weights(given).items()}
    network = models.network(given, weights).eval()
    data = samples_of(case, 7)
    seen: list[np.ndarray] = []
    hook = network.get_submodule(feature).register_forward_hook(
        lambda module, inputs, output: seen.append(output.detach().double().numpy())
    )
    with torch.no_grad():
        for one in data.inputs:
            network(one[None])
    hook.remove()
    width = models.layer_widths(given)[layer]
    expected = np.zeros(width)
    for output in seen:
        units = output[0] if name == "signal" else np.moveaxis(output[0], -1, 0)
        expected += [np.maximum(units[unit], 0).mean() / 7 for unit in range(width)]
    layers = prunable(given, "all").layers
    found = feature_ranks(network, layers, data, lambda *_: None)[layer]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert len(set(found)) > 2


def test_maps_alone_count_where_there_are_some() -> None:
    """A channel and its gate share units: the gate has no map."""
    case = CASES["squeeze-excitation"]
    given = case.architecture
    weights = {n: t.float() for n, t in some_weights(given).items()}
    layers = [layer for layer in prunable(given, "all").layers if layer.leader == "conv"]
    images = torch.randint(0, 256, (5, 12, 12, 3), dtype=torch.uint8, generator=torch.Generator())
    data = Samples(images, torch.zeros(5, dtype=torch.int64))
    before = feature_ranks(models.network(given, weights), layers, data, lambda *_: None)
    weights["excite.bias"] += 100
    assert feature_ranks(models.network(given, weights), layers, data, lambda *_: None) == before
    weights["conv.bias"][2] = -1000
    assert feature_ranks(models.network(given, weights), layers, data, lambda *_: None)["conv"][2] == 0


def test_kernels_and_torch_rank_alike() -> None:
    lenet = models.architecture("lenet", 10)
    weights = models.initialise(lenet, 0)
    layers = prunable(lenet, "all").layers
    images = torch.randint(0, 256, (6, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator())
    data = Samples(images, torch.zeros(6, dtype=torch.int64))
    said: list[tuple[int, int]] = []
    by_c = unit_ranks(lenet, weights, "c", layers, data, lambda *tick: said.append(tick))
    by_torch = unit_ranks(lenet, weights, "torch", layers, data, lambda *_: None)
    assert said == [(6, 12), (12, 12)]
    assert list(by_c) == list(by_torch) == ["conv1", "conv2", "fc1", "fc2"]
    for name, numbers in by_torch.items():
        assert by_c[name] == pytest.approx(numbers, rel=1e-4)
