"""One table of all methods, and what must hold for each: a new one is tested by being entered."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from feddumap import run as api
from feddumap.core.algorithm import RoundView, mean_of_uploads
from feddumap.core.messages import Answer, Broadcast, Question, Upload
from feddumap.core.tensors import all_finite, digest
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.device.surveys import label_counts, output_bias_gradient
from feddumap.engine import cohort
from feddumap.engine.local import LocalCohort
from feddumap.engine.rounds import broadcast_of, take_census
from feddumap.errors import FeddumapError
from feddumap.methods import compose, registry
from feddumap.models import network
from feddumap.system.determinism import deterministic
from feddumap.training.samples import Samples, to_input
from tests.conftest import small
from tests.support.methods import NAMES, bits, config_of, every, outcome, resumed, tiny

pytestmark = pytest.mark.usefixtures("short_distillation")

KEYS = [(name, key) for name in NAMES for key, *_ in registry.keys(name)]


@cache
def whole(name: str) -> tuple[api.Run, list[str]]:
    """A method's small run on one worker, and its bits after each round."""
    run = api.start(config_of(name))
    return run, [bits(run) for _ in run]


@every
def test_two_workers_and_a_resume_change_no_bit(home: object, name: str, tmp_path: Path) -> None:
    expected, after = whole(name)
    few = min(2, len(after))
    left, again = resumed(config_of(name, run={"workers": 2}), tmp_path / "run", few)
    assert left == after[few - 1]  # two workers
    assert outcome(again) == outcome(expected)  # and the rest from the checkpoint


@every
def test_rounds_and_seeds_matter(home: object, name: str) -> None:
    run, after = whole(name)
    assert len(after) == run.rounds == (1 if name == "fedkt" else 3)
    assert len({digest(api.start(run.config).state.weights), *after}) == 1 + run.rounds
    other = api.train(config_of(name, run={"seed": 778}, train={"rounds": 1}))
    assert bits(other) != after[0]


OTHERWISE = {"hybrid-fl", "feddf", "fedkt", "fedkt-iter"}
"""Methods that do more than average when uploads become one model."""


@every
def test_one_device_is_its_own_mean(home: object, name: str) -> None:
    """To the bit, with whatever it sends besides its model."""
    run = api.start(config_of(name))
    algorithm = run._algorithm
    assert (algorithm.aggregate is mean_of_uploads) == (name not in OTHERWISE)
    if name in OTHERWISE:
        return
    message = replace(broadcast_of(run.state, run.config), extra=algorithm.send(run.state))
    executor = Executor(run.config, SplitHoldings(run.dataset, run.split, run.config.run.seed), algorithm)
    with deterministic():
        upload, _ = executor.train(message, 3, {})
    view = RoundView(None, run.state, message.lr, [])  # type: ignore[arg-type]
    merged = algorithm.aggregate([upload], view)
    assert digest(upload.weights) != digest(message.weights)
    assert digest(merged.weights) == digest(upload.weights)
    assert digest(merged.extra) == digest(upload.extra)


@every
def test_iid_data_gives_finite_models_and_records(home: object, name: str) -> None:
    data = {"partition": "iid", "server_classes": 10}
    run = api.train(config_of(name, data=data, train={"rounds": 2}))
    assert all_finite({**run.state.weights, **run.state.steps})
    for record in [*run.records, *whole(name)[0].records]:
        assert json.loads(json.dumps(record, allow_nan=False)) == record


class Meter(LocalCohort):
    """Adds up what passes between rounds, by round: message bytes for each device, and what comes back."""

    down: ClassVar[Counter[int]]
    up: ClassVar[Counter[int]]
    planned: ClassVar[Callable[[Broadcast], int]]

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload]:
        self.down[broadcast.round] += broadcast.nbytes * len(devices)
        for upload in super().train(broadcast, devices):
            assert upload.nbytes(broadcast.mask) == self.planned(broadcast)  # which is what the clock counts
            self.up[broadcast.round] += upload.nbytes(broadcast.mask)
            yield upload

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        for answer in super().survey(question, broadcast, devices):
            if question.name != "census":  # before the first round, and in no record
                self.down[broadcast.round] += broadcast.nbytes
                self.up[broadcast.round] += answer.nbytes
            yield answer


@every
def test_the_wire_is_counted_and_test_data_trains_nothing(
    home: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohort, "LocalCohort", Meter)
    monkeypatch.setattr(Meter, "down", Counter(), raising=False)
    monkeypatch.setattr(Meter, "up", Counter(), raising=False)
    run = api.start(config_of(name))
    monkeypatch.setattr(Meter, "planned", staticmethod(run._algorithm.reply), raising=False)
    run.dataset = replace(run.dataset, test_labels=(run.dataset.test_labels + 1) % 10)
    run.run()
    gift = 20 * min(run._algorithm.shared, len(run.split.server)) * 257  # images given before round 0
    Meter.down[0] += gift
    assert [record["bytes_down"] for record in run.records] == [Meter.down[t] for t in range(run.rounds)]
    assert [record["bytes_up"] for record in run.records] == [Meter.up[t] for t in range(run.rounds)]
    assert min(*Meter.down.values(), *Meter.up.values()) > 0
    # other test labels are other scores, and nothing else
    expected, after = whole(name)
    assert bits(run) == after[-1]
    for mine, theirs in zip(run.records, expected.records, strict=True):
        assert mine["loss"] != theirs["loss"]
        assert {k for k in mine if mine[k] != theirs[k]} <= {"accuracy", "loss", "wall"}


BASES = ("fedavg", "feddu", "feddum")
NO_PRUNING: dict[str, Any] = {"prune_round": 1, "rate": "fixed", "fixed_rate": 0.0}
REDUCTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("feddu", {"c": 0.0}, "fedavg"),
    ("fedprox", {"mu": 0.0}, "fedavg"),
    ("server-momentum", {"server_momentum": 0.0}, "fedavg"),
    ("server-momentum", {"server_momentum": 0.0, "momentum_start": "zero"}, "fedavg"),
    ("device-momentum", {"device_momentum": 0.0}, "fedavg"),
    ("fedda", {"momentum": 0.0}, "fedavg"),
    ("mime-lite", {"momentum": 0.0}, "fedavg"),
    ("feddu-sm", {"server_momentum": 0.0}, "feddu"),
    ("feddu-dm", {"device_momentum": 0.0}, "feddu"),
    ("feddu-da", {"momentum": 0.0}, "feddu"),
    ("feddum", {"server_momentum": 0.0, "device_momentum": 0.0}, "feddu"),
    ("feddum", {"server_momentum": 0.0, "device_momentum": 0.0, "momentum_start": "zero"}, "feddu"),
    ("feddum", {"server_momentum": 0.0}, "feddu-dm"),
    ("feddum", {"device_momentum": 0.0}, "feddu-sm"),
    ("fedap", NO_PRUNING, "fedavg"),
    ("fedduap", NO_PRUNING, "feddu"),
    ("feddumap", NO_PRUNING, "feddum"),
    *(("hrank", {"base": base, "prune_round": 1, "prune_rate": 0.0}, base) for base in BASES),
    *(("imc", {"base": base, **NO_PRUNING}, base) for base in BASES),
]
"""A method, keys that switch off what it adds, and the method that it then is."""


@pytest.mark.parametrize(("name", "keys", "plain"), REDUCTIONS)
def test_a_method_without_its_addition_is_its_base_bit_for_bit(
    home: object, name: str, keys: dict[str, Any], plain: str
) -> None:
    """The weights after each of three rounds, and so what is measured of them. With their default keys the
    two differ."""
    run = api.start(tiny(method={"name": name, **keys}))
    after = [digest(run.state.weights) for _ in run]
    assert after == plain_digests(plain)
    assert [(r["accuracy"], r["loss"]) for r in run.records] == [
        (r["accuracy"], r["loss"]) for r in whole(plain)[0].records
    ]
    assert digest(whole(name)[0].state.weights) != digest(whole(plain)[0].state.weights)


@cache
def plain_digests(name: str) -> list[str]:
    """Digests of a method's weights after each round of its small run."""
    run = api.start(config_of(name))
    return [digest(run.state.weights) for _ in run]


@pytest.mark.parametrize("name", ["feddu", "feddu-s", "feddum"])
def test_no_more_is_sent_than_with_fedavg(home: object, name: str) -> None:
    wire = ("bytes_down", "bytes_up", "clock")
    sent, plain = ([[r[key] for key in wire] for r in whole(n)[0].records] for n in (name, "fedavg"))
    assert sent == plain
    assert sent[0][:2] == [4 * 15_626 * 2] * 2  # LeNet to and from two devices


@every
def test_unknown_keys_are_refused_by_name(home: object, name: str) -> None:
    with pytest.raises(FeddumapError, match=r"unknown key '?method\.wrong_key"):
        api.start(small(method={"name": name, "wrong_key": 1}))
    for key in {key for key, *_ in registry.keys(name)} - {"c", "rate"}:  # one letter more is near another
        with pytest.raises(FeddumapError, match=rf"method\.{key}x: did you mean method\.{key}\?"):
            registry.resolve(small(method={"name": name, f"{key}x": 1}).method)


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_ill_typed_keys_are_refused_by_name(name: str, key: str) -> None:
    with pytest.raises(FeddumapError, match=rf"method\.{key} = \{{'no': 1\}}: \w+"):
        registry.resolve(small(method={"name": name, key: {"no": 1}}).method)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("feddu", "c", -1.0),
        ("feddu", "decay", 0.0),
        ("feddu", "decay", 1.1),
        ("feddu", "decay", "held_out"),
        ("feddu", "accuracy_weight", "one minus"),
        ("feddu", "label_mix", "none"),
        ("feddu-s", "effective_steps", 0),
        ("feddu-s", "effective_steps", "half"),
        ("feddum", "server_momentum", 1.0),
        ("feddum", "device_momentum", -0.1),
        ("feddum", "momentum_start", "last"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(FeddumapError, match=rf"method\.{key} = {value!r}: "):
        registry.resolve(small(method={"name": name, key: value}).method)


@every
def test_every_method_and_key_is_described(name: str) -> None:
    assert registry.RECIPES[name].summary.endswith((".", ")."))
    defaults = registry.resolve(small(method={"name": name}).method).settings
    for key, kind, default, description in registry.keys(name):
        assert kind, key
        assert description, key
        assert defaults.get(key) == default


@every
def test_a_server_without_data(home: object, name: str, tmp_path: Path) -> None:
    """A method that needs images on the server says so at once; the others do without."""
    config = config_of(name, data={"server_fraction": 0.0}, train={"rounds": 2})
    if not compose(config).server_data:
        assert all_finite(api.train(config).state.weights)
        return
    with pytest.raises(FeddumapError, match=f"'{name}' needs .*images on the server.*server_fraction = 0"):
        api.start(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [{"name": "feddf"}, {"name": "feddumap", "decay": "held-out"}])
def test_a_server_with_too_little_data(home: object, method: dict[str, str], tmp_path: Path) -> None:
    """What divides the server's images needs two of them."""
    few = {"server_fraction": 0.0008, "server_classes": 1}
    with pytest.raises(FeddumapError, match=r"needs at least 2 images on the server.* gives 1: raise it"):
        api.start(small(method=method, data=few), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert len(api.start(small(method={"name": "feddumap"}, data=few)).split.server) == 1


def test_which_methods_need_server_data() -> None:
    without = {name for name in NAMES if not compose(config_of(name)).server_data}
    assert without & {"fedavg", "fedap", "feddu", "feddu-s", "feddum", "fedduap", "feddumap"} == {
        "fedavg", "fedap",
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 100), st.lists(st.integers(0, 10**6), min_size=1, max_size=500))
def test_the_gradient_tells_the_counts(classes: int, numbers: list[int]) -> None:
    labels = np.array(numbers) % classes
    gradient = output_bias_gradient(labels, classes).tolist()
    counts = label_counts({"samples": len(labels), "gradient": gradient})
    assert counts.tolist() == np.bincount(labels, minlength=classes).tolist()


def test_the_gradient_is_that_of_a_network_with_a_zero_output_layer(home: object) -> None:
    run = api.start(small())
    data = Samples.take(run.dataset.train_inputs, run.dataset.train_labels, run.split.device(0)[:30])
    model = network(run.state.architecture, run.state.weights).double()
    torch.nn.init.zeros_(model.fc3.weight)
    torch.nn.init.zeros_(model.fc3.bias)
    F.cross_entropy(model(to_input(data.inputs).double()), data.targets).backward()
    told = output_bias_gradient(data.targets.numpy(), 10)
    torch.testing.assert_close(told, model.fc3.bias.grad, rtol=0, atol=1e-12)


def test_counts_and_gradient_are_the_same_run(home: object) -> None:
    run = api.train(config_of("feddu", method={"label_mix": "gradient"}))
    assert outcome(run) == outcome(whole("feddu")[0])


class RecordingCohort:
    """A cohort in this process that records what it was asked and answered."""

    def __init__(self, run: api.Run) -> None:
        self.executor = Executor(
            run.config, SplitHoldings(run.dataset, run.split, run.config.run.seed), compose(run.config)
        )
        self.answers: list[Answer] = []

    def survey(self, question: Question, message: Broadcast, devices: Sequence[int]) -> list[Answer]:
        self.answers += [self.executor.answer(question, message, device) for device in devices]
        return self.answers


@pytest.mark.parametrize("labels", ["none", "counts", "gradient"])
def test_devices_tell_of_their_labels_only_what_is_asked(home: object, labels: Any) -> None:
    run = api.start(small())
    recording = RecordingCohort(run)
    census = take_census(recording, run.state, run.config, labels)  # type: ignore[arg-type]
    assert {key for answer in recording.answers for key in answer.values} == {"samples", labels} - {"none"}
    if labels == "none":
        assert census.labels is None
    else:
        np.testing.assert_array_equal(census.labels, run.split.counts(run.dataset.train_labels, 10))


def test_fedavg_asks_for_no_labels(home: object) -> None:
    run = api.start(small())
    assert run._context(run._engine()).census.labels is None
