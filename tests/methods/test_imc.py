"""IMC: a mask over the smallest weights, from its choice to the wire, training and resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import floor, log2
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.messages import CIFAR_INPUT, Answer, Broadcast, Question, ServerState, Tensors, Upload
from feddumap.core.rng import stream
from feddumap.core.sampling import select
from feddumap.core.tensors import digest
from feddumap.data.sources.formats import DIGITS_INPUT
from feddumap.engine import cohort
from feddumap.engine.local import LocalCohort
from feddumap.errors import FeddumapError
from feddumap.models import architecture, build, initialise
from feddumap.pruning import rates
from feddumap.pruning.masks import apply_mask, magnitude_mask, maskable
from feddumap.runs.reader import read_checkpoint
from feddumap.system.determinism import deterministic
from feddumap.training.backends import Kernels, make_model
from feddumap.training.loop import fit
from feddumap.training.optimizers import UpdateRule, masked, momentum, sgd
from feddumap.training.samples import batches
from tests.conftest import both_kernels, small
from tests.support.oracles import averaged, samples, taken, walk

FULL = 15_626  # LeNet's parameters, all of which can be masked
BITMAP = 19 + 1 + 300 + 2 + 240 + 15 + 1260 + 11 + 105 + 2
"""⌈n/8⌉ of LeNet's 450, 6, 2400, 16, 48000, 120, 10080, 84, 840 and 10."""


def config(base: str = "fedavg", rounds: int = 4, **keys: Any) -> Config:
    method = {"name": "imc", "base": base, "prune_round": 1, "rate": "fixed", "fixed_rate": 0.4, **keys}
    return small(method=method, train={"rounds": rounds})


def smallest(weights: Tensors, names: Sequence[str], rate: Fraction) -> Tensors:
    """The obvious way: a list of all (|w|, position), sorted, and its first ⌊R p⌋ left out."""
    everything = [abs(float(v)) for name in names for v in weights[name].reshape(-1)]
    ranked = sorted(range(len(everything)), key=lambda position: (everything[position], position))
    gone = set(ranked[: floor(len(everything) * rate)])
    mask, position = {}, 0
    for name in names:
        count = weights[name].numel()
        kept = [position + i not in gone for i in range(count)]
        mask[name] = torch.tensor(kept, dtype=torch.bool).reshape(weights[name].shape)
        position += count
    return mask


shapes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=150)
@given(shapes, st.integers(0, 64), st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_the_smallest_weights_of_all_are_left_out(
    sizes: list[list[int]], sixtyfourths: int, seed: int, span: int
) -> None:
    """Whole numbers of a narrow span, so that many are equal; 64ths, so that R p is exact."""
    rng = np.random.default_rng(seed)
    weights = {
        f"t{i}": torch.from_numpy(rng.integers(-span, span + 1, size).astype(np.float32))
        for i, size in enumerate(sizes)
    }
    names, rate = list(reversed(weights)), Fraction(sixtyfourths, 64)
    got = magnitude_mask(weights, names, float(rate))
    total = sum(tensor.numel() for tensor in weights.values())
    assert sum(int((~kept).sum()) for kept in got.values()) == floor(total * rate)
    expected = smallest(weights, names, rate)
    assert list(got) == names
    for name in names:
        assert got[name].dtype == torch.bool
        assert torch.equal(got[name], expected[name]), name


def test_a_channels_last_tensor_is_counted_in_its_own_order() -> None:
    plain = torch.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2) % 5
    odd = plain.float().to(memory_format=torch.channels_last)
    (got,) = magnitude_mask({"w": odd}, ["w"], 0.5).values()
    assert torch.equal(got, smallest({"w": plain}, ["w"], Fraction(1, 2))["w"])


def test_convolutions_and_linear_layers_are_masked_and_batch_norm_never() -> None:
    shape = architecture("resnet18", 10)
    module = build(shape)
    owners = [(name, module.get_submodule(name.rpartition(".")[0])) for name, _ in module.named_parameters()]
    layers = [name for name, owner in owners if isinstance(owner, nn.Conv2d | nn.Linear)]
    norms = [name for name, owner in owners if isinstance(owner, nn.BatchNorm2d)]
    assert sorted(maskable(shape, biases=True)) == sorted(layers)
    assert sorted(maskable(shape, biases=False)) == sorted(n for n in layers if n.endswith(".weight"))
    # 17 convolutions, 3 projections and the linear layer, and a norm after each of the former
    assert (len(layers), len(norms), len(owners)) == (2 * 21, 2 * 20, 2 * 41)
    assert {"stem.weight", "stem.bias", "fc.weight", "fc.bias"} <= set(layers)
    lenet = architecture("lenet", 10)
    assert set(maskable(lenet, biases=True)) == set(build(lenet).state_dict())


def test_the_wire_of_a_masked_network_with_batch_norm() -> None:
    """Convolutions of 200 + 8 and 864 + 12, a linear layer of 120 + 10; 8 channels of batch norm with two
    parameters and two statistics each, and a counter of eight bytes."""
    shape = architecture("tests.support.own_model:make", 10, DIGITS_INPUT)
    names = maskable(shape, biases=True)
    start = ServerState(0, shape, initialise(shape, 1))
    state = apply_mask(start, magnitude_mask(start.weights, names, 0.75))
    left, rest = 1214 - 910, 4 * 4 * 8 + 8  # ⌊0.75 · 1214⌋ = 910
    bitmap = 25 + 1 + 108 + 2 + 15 + 2
    message = Broadcast(0, shape, state.weights, 0.1, mask=state.mask)
    assert message.nbytes == 4 * left + rest + bitmap
    assert message.reply_nbytes == Upload(0, 0, 1, 1, state.weights).nbytes(state.mask) == 4 * left + rest
    assert sum(int((state.weights[name] != 0).sum()) for name in names) == left
    assert all(torch.equal(state.weights[n], t) for n, t in start.weights.items() if n not in names)
    more = replace(message, extra={"v/0.weight": state.weights["0.weight"]})  # comes along whole
    assert (more.nbytes, more.reply_nbytes) == (message.nbytes + 800, message.reply_nbytes + 800)


@pytest.mark.parametrize("base", ["fedavg", "feddu", "feddum"])
def test_masked_weights_stay_zero_and_the_others_move(home: object, base: str) -> None:
    run, plain = api.start(config(base)), api.start(small(method={"name": base}, train={"rounds": 1}))
    rounds = iter(run)
    next(rounds)
    plain.run()
    assert digest(run.state.weights) == digest(plain.state.weights)  # round 0 is that of the method itself
    assert {**run.records[0], "wall": 0} == {**plain.records[0], "wall": 0}
    before = run.state.weights
    values = torch.cat([tensor.reshape(-1).abs() for tensor in before.values()]).sort().values
    gone = floor(FULL * 0.4)
    for number in (1, 2, 3):
        next(rounds)
        mask, after = run.state.mask, run.state.weights
        if number == 1:
            assert sum(int((~kept).sum()) for kept in mask.values()) == gone == 6_250
            for name, kept in mask.items():
                assert not bool((before[name][kept].abs() < values[gone - 1]).any())
                assert not bool((before[name][~kept].abs() > values[gone - 1]).any())
        moved = torch.cat([(after[name] != before[name])[kept] for name, kept in mask.items()])
        assert moved.double().mean() > 0.5
        for name, kept in mask.items():
            assert not bool(after[name][~kept].any()), name
            if base == "feddum":
                assert not bool(run.state.steps[f"1/momentum/{name}"][~kept].any()), name
        if base == "feddum":
            assert bool(run.state.steps["1/momentum/fc1.weight"][mask["fc1.weight"]].any())
        before = after
        record = run.records[number]
        assert base == "fedavg" or record["alpha"] > 0.001  # the server trained too
        assert (record["parameters"], record["macs"]) == (FULL - gone, 44_040)
        up, down = 4 * (FULL - gone), 4 * (FULL - gone) + BITMAP
        assert (record["bytes_down"], record["bytes_up"]) == (3 * down, 3 * up)
        spent = record["clock"] - run.records[number - 1]["clock"]
        assert spent == pytest.approx(1.3 + 3 * (down + up) / 2 / 2**20 * (1 / 6.25 + 1 / 12.5))
    assert ["pruning" in record for record in run.records] == [False, True, False, False]
    told = run.records[1]["pruning"]
    assert (told["rate"], told["nodes"]) == (0.4, [])
    assert told["parameters"] == {"before": FULL, "after": FULL - gone}
    assert told["macs"] == {"before": 44_040, "after": 44_040}
    assert {name: layer["kept"] for name, layer in told["layers"].items()} == {
        name: int(kept.sum()) for name, kept in mask.items()
    }
    assert run.summary["parameters"] == FULL - gone


def test_training_inside_a_mask_equals_masked_gradients(home: object) -> None:
    """Two rounds in float64: w_k ← w_k − η (mask · g)."""
    run = api.start(config(rounds=3, fixed_rate=0.5))
    rounds = iter(run)
    next(rounds)
    mask = smallest(run.state.weights, maskable(run.state.architecture, biases=True), Fraction(1, 2))
    w = {name: (tensor * mask[name]).double() for name, tensor in run.state.weights.items()}
    for number in (1, 2):
        chosen = select(run.config, number)
        data = [taken(run, run.split.device(device)) for device in chosen]
        models = [
            walk(run, w, own, stream(777, "batches", number, device), number, lambda n, g: mask[n] * g)
            for device, own in zip(chosen, data, strict=True)
        ]
        w = averaged([len(own) for own in data], models)
        next(rounds)
        for name, tensor in run.state.weights.items():
            torch.testing.assert_close(tensor.double(), w[name], rtol=1e-4, atol=2e-6)
        assert all(torch.equal(run.state.mask[name], kept) for name, kept in mask.items())


@both_kernels
@pytest.mark.parametrize("rule", [sgd(), momentum(0.8)])
def test_a_mask_that_keeps_all_changes_no_bit(rule: UpdateRule, kernels: Kernels) -> None:
    shape = architecture("lenet", 10)
    weights = initialise(shape, 3)
    everything = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in weights.items()}
    some = {**everything, "fc1.weight": torch.rand(120, 400) < 0.5}
    bits = []
    with deterministic():
        for used in (rule, masked(rule, everything), masked(rule, {}), masked(rule, some)):
            model = make_model(shape, weights, kernels)
            fit(model, batches(samples(30), 2, 8, stream(1, "b"), augment=CIFAR_INPUT), used, 0.05)
            bits.append(digest(model.weights()))
    assert bits[0] == bits[1] == bits[2] != bits[3]


def test_a_rate_of_zero_is_the_method_itself(home: object) -> None:
    run = api.train(config(rounds=3, fixed_rate=0.0))
    assert digest(run.state.weights) == digest(api.train(small()).state.weights)
    assert all(bool(kept.all()) for kept in run.state.mask.values())


def test_resume_keeps_the_mask(home: object, tmp_path: Path) -> None:
    run = api.start(config(rounds=3), tmp_path / "run")
    rounds = run.iterate()
    next(rounds), next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    run.close()
    saved = read_checkpoint(tmp_path / "run" / "checkpoint-000002.json").state.mask
    again = api.resume(tmp_path / "run")
    assert digest(saved) == digest(again.state.mask) == digest(run.state.mask)
    assert {kept.dtype for kept in saved.values()} == {torch.bool}
    again.run().close()
    for name, kept in saved.items():
        assert not bool(again.state.weights[name][~kept].any())
    assert digest(again.state.weights) == digest(api.train(config(rounds=3)).state.weights)


Asked = list[tuple[str, dict[str, Any], list[int]]]


class RecordingCohort(LocalCohort):
    """Remembers who was asked what."""

    asked: ClassVar[Asked]

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        self.asked.append((question.name, dict(question.settings), list(devices)))
        return super().survey(question, broadcast, devices)


@pytest.fixture
def asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setattr(rates, "STEPS", 6)
    monkeypatch.setattr(rates, "SAMPLES", 16)
    monkeypatch.setattr(cohort, "LocalCohort", RecordingCohort)
    monkeypatch.setattr(RecordingCohort, "asked", [], raising=False)
    return RecordingCohort.asked


def test_the_servers_rate_asks_no_device(asked: Asked) -> None:
    run = api.train(config(rounds=2, rate="density"))  # rate_nodes is server by default
    assert [(name, said) for name, said, devices in asked if devices] == [("census", {"labels": "none"})]
    told = run.records[1]["pruning"]
    (node,) = told["nodes"]
    assert (node["device"], node["samples"], node["weight"]) == (-1, len(run.split.server), 1.0)
    assert told["rate"] == node["p"] > 0
    assert sum(int((~kept).sum()) for kept in run.state.mask.values()) == floor(FULL * node["p"])
    assert run.records[1]["bytes_up"] == 3 * 4 * (FULL - floor(FULL * node["p"]))
    with pytest.raises(FeddumapError, match=r"'imc' needs images on the server.*server_fraction = 0"):
        api.start(config(rate="density").replace(data={"server_fraction": 0.0}))
    api.start(config().replace(data={"server_fraction": 0.0}))  # a fixed rate needs none


def entropy(p: np.ndarray) -> float:
    return -sum(float(x) * log2(x) for x in p if x > 0)


def test_all_nodes_rates_are_weighed_as_fedap_does(
    asked: Asked,
) -> None:
    run = api.train(config(rounds=2, rate="density", rate_nodes="all"))
    everybody = list(range(6))
    assert [(name, devices) for name, _, devices in asked] == [("census", everybody), ("rate", everybody)]
    assert asked[0][1] == {"labels": "counts"}
    told = run.records[1]["pruning"]
    counts = run.split.counts(run.dataset.train_labels, 10).astype(float)
    own = np.bincount(run.dataset.train_labels[run.split.server], minlength=10)
    everyone = counts.sum(0) / counts.sum()
    raw = []
    for mix in [own, *counts]:  # ω_k ∝ n_k / (JS + 1e-4), JS = H((p + q)/2) − (H(p) + H(q))/2 in bits
        p = mix / mix.sum()
        degree = entropy((p + everyone) / 2) - (entropy(p) + entropy(everyone)) / 2
        raw.append(mix.sum() / (degree + 1e-4))
    assert [node["weight"] for node in told["nodes"]] == pytest.approx([r / sum(raw) for r in raw])
    assert told["rate"] == pytest.approx(
        sum(r * node["p"] for r, node in zip(raw, told["nodes"], strict=True)) / sum(raw)
    )
    assert sum(int((~kept).sum()) for kept in run.state.mask.values()) == floor(FULL * told["rate"])
