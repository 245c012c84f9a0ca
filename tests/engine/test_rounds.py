"""The loop of rounds: FedAvg against an oracle, choice, guards, clock and bytes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.clock import Timing
from feddumap.core.messages import MissingUpload, Question, Tensors, Upload
from feddumap.core.sampling import select
from feddumap.core.tensors import all_finite, digest, same_form, weighted_mean
from feddumap.data.dataset import Dataset
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.engine.rounds import UploadFilter, broadcast_of, take_census
from feddumap.errors import FeddumapError
from feddumap.methods import compose
from feddumap.system.determinism import deterministic
from tests.conftest import small
from tests.support.oracles import sgd_oracle
from tests.support.runs import slow_cohort


def test_fedavg_equals_the_oracle(home: object) -> None:
    """w = Σ n_k w_k / Σ n_k over the chosen devices, round after round."""
    config = small(data={"partition": "dirichlet", "size_spread": 0.8}, train={"rounds": 2, "lr_decay": 0.5})
    run = api.start(config)
    weights = run.state.weights
    for number in range(2):
        chosen = select(run.config, number)
        trained = [sgd_oracle(run, weights, device, number) for device in chosen]
        sizes = [len(run.split.device(device)) for device in chosen]
        weights = {
            name: sum(n * model[name] for n, model in zip(sizes, trained, strict=True)) / sum(sizes)
            for name in weights
        }
    run.run()
    assert run.records[1]["samples"] == sum(sizes)
    for name, tensor in run.state.weights.items():
        torch.testing.assert_close(tensor.double(), weights[name].double(), rtol=1e-4, atol=1e-6)


def test_one_device_with_all_the_data_is_plain_sgd(home: object) -> None:
    config = small(data={"devices": 1, "partition": "iid"}, train={"cohort": 1, "rounds": 1})
    run = api.start(config)
    expected = sgd_oracle(run, run.state.weights, 0, 0)
    run.run()
    for name, tensor in run.state.weights.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=1e-4, atol=1e-6)


def test_one_upload_is_the_mean_of_itself() -> None:
    weights = {"w": torch.randn(1000), "steps": torch.tensor(7)}
    for samples in (1, 3, 397, 40_000):
        assert digest(weighted_mean([(samples, weights)])) == digest(weights)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=12), st.integers(0, 100))
def test_weighted_mean_equals_numpy_in_float64(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [rng.standard_normal(50).astype(np.float32) for _ in sizes]
    got = weighted_mean((n, {"w": torch.from_numpy(model)}) for n, model in zip(sizes, models, strict=True))
    expected = np.average(np.float64(models), axis=0, weights=sizes)
    np.testing.assert_allclose(got["w"].numpy(), expected, rtol=1e-6, atol=1e-7)
    assert got["w"].dtype == torch.float32


def test_integer_buffers_are_never_averaged() -> None:
    mean = weighted_mean([(1, {"count": torch.tensor(2)}), (1, {"count": torch.tensor(5)})])
    assert mean["count"].dtype == torch.int64
    assert mean["count"].item() == 2


def test_selection_is_uniform_without_replacement() -> None:
    config = Config()
    counts = np.zeros(100)
    for number in range(2000):
        chosen = select(config, number)
        assert len(set(chosen)) == 10
        assert chosen == sorted(chosen)
        counts[chosen] += 1
    assert abs(counts - 200).max() < 5 * np.sqrt(200 * 0.9)  # binomial
    assert select(config, 3) == select(config, 3)
    assert select(config, 3) != select(config.replace(run={"seed": 778}), 3)


def test_learning_rate_decays_per_round(home: object) -> None:
    run = api.start(Config())
    assert broadcast_of(run.state, run.config).lr == 0.1
    later = replace(run.state, round=10)
    assert broadcast_of(later, run.config).lr == pytest.approx(0.1 * 0.99**10)


def test_records_count_clock_bytes_and_cost(home: object) -> None:
    run = api.train(small(train={"rounds": 3}, run={"evaluate_every": 2}))
    bytes_ = 4 * 15_626 * 3
    seconds = 1.3 + bytes_ / 2**20 * (1 / 6.25 + 1 / 12.5)  # LeNet's round in the paper's profile
    for number, record in enumerate(run.records):
        assert record["round"] == number
        assert (record["bytes_down"], record["bytes_up"]) == (bytes_, bytes_)
        assert (record["parameters"], record["macs"]) == (15_626, 44_040)
        assert record["clock"] == pytest.approx(seconds * (number + 1))
        assert len(record["devices"]) == 3
        assert record["samples"] == sum(len(run.split.device(device)) for device in record["devices"])
    assert [record["accuracy"] is None for record in run.records] == [True, False, False]  # the last always
    assert run.records[0]["lr"] == 0.05


def test_a_deadline_drops_stragglers(home: object, tmp_path: object) -> None:
    """Speeds so far apart that a deadline between them is easy to name."""
    clock = {"profile": "general", "spread": 2.0, "macs_per_second": 1e9}
    free = api.train(small(clock=clock, train={"rounds": 2, "cohort": 6}))
    assert "dropped" not in free.records[0]
    slowest = free.records[0]["clock"]
    run = api.train(small(clock={**clock, "deadline": slowest * 0.9}, train={"rounds": 2, "cohort": 6}))
    first = run.records[0]
    assert first["dropped"]
    assert sorted(first["devices"] + first["dropped"]) == list(range(6))
    assert first["clock"] <= slowest * 0.9
    assert first["bytes_up"] == first["bytes_down"] * len(first["devices"]) // 6


def test_a_round_nobody_finishes_keeps_the_model(home: object, tmp_path: Path) -> None:
    """Others than the chosen ones would have met the deadline, so the run goes on."""
    config = small(train={"rounds": 1})
    run = api.start(config.replace(clock=slow_cohort(config, tmp_path / "fleet.csv")))
    before = digest(run.state.weights)
    run.run()
    assert digest(run.state.weights) == before
    assert run.records[0]["devices"] == []
    assert len(run.records[0]["dropped"]) == 3


def test_a_deadline_that_nobody_can_meet_ends_the_run(home: object) -> None:
    run = api.start(small(clock={"profile": "general", "deadline": 1e-6}))
    message = (
        r"clock\.deadline = 1e-06 seconds drops all 6 devices.*the fastest, device (\d), needs ([\d.]+);"
    )
    with pytest.raises(FeddumapError, match=message) as caught:
        run.run()
    found = re.search(message, str(caught.value))
    assert found is not None
    free = api.train(small(clock={"profile": "general"}, train={"rounds": 1, "cohort": 6}))
    assert 1e-6 < float(found[2]) <= free.records[0]["clock"]  # the slowest takes a whole round
    assert run.records == []


def gate_with(run: api.Run, *changes: Tensors) -> tuple[UploadFilter, list[Upload]]:
    message = broadcast_of(run.state, run.config)
    uploads = [
        Upload(device, 0, 10, 1, {**message.weights, **change}) for device, change in enumerate(changes)
    ]
    return UploadFilter(message, Timing(1.0, tuple(range(len(changes))), ()), lambda *_: None), uploads


def test_a_model_with_nan_is_left_out_and_named(home: object) -> None:
    run = api.start(small())
    bias = run.state.weights["fc1.bias"]
    for value in (float("nan"), float("inf"), -float("inf")):
        gate, uploads = gate_with(run, {}, {"fc1.bias": torch.full_like(bias, value)}, {})
        assert [upload.device for upload in gate.admit(uploads)] == [0, 2]
        assert gate.metrics({}) == {"rejected": [1]}
        assert gate.nbytes == sum(upload.nbytes({}) for upload in uploads), "it was sent all the same"


def test_a_lost_upload_is_left_out_and_named(home: object) -> None:
    run = api.start(small())
    gate, (first, _, third) = gate_with(run, {}, {}, {})
    passed = list(gate.admit([first, MissingUpload(1, "it did not answer"), third]))
    assert [upload.device for upload in passed] == [0, 2]
    assert list(gate.receipts) == [0, 2]
    assert gate.metrics({}) == {"lost": {"1": "it did not answer"}}
    gate, _ = gate_with(run, {}, {})
    with pytest.raises(FeddumapError, match=r"none of 2 devices sent a usable model .*\(device 0: gone\)"):
        list(gate.admit([MissingUpload(0, "gone"), MissingUpload(1, "late")]))


def test_when_all_diverge_the_run_says_so(home: object) -> None:
    run = api.start(small(train={"lr": 1e30}))
    with pytest.raises(
        FeddumapError, match=r"round 0: the models of all 3 devices diverged .* lower train.lr"
    ):
        run.run()


@pytest.mark.parametrize("change", [{"fc1.bias": torch.zeros(3)}, {"more": torch.zeros(1)}])
def test_a_model_of_another_form_is_refused(home: object, change: Tensors) -> None:
    run = api.start(small())
    gate, uploads = gate_with(run, change)
    with pytest.raises(
        FeddumapError, match="device 0 answered round 0 with a model of round 0 or of another"
    ):
        list(gate.admit(uploads))


def test_forms_and_finiteness() -> None:
    one = {"w": torch.zeros(2), "n": torch.tensor(3)}
    assert same_form(one, {"w": torch.ones(2), "n": torch.tensor(4)})
    assert not same_form(one, {"w": torch.ones(2)})
    assert not same_form(one, {"w": torch.ones(2).double(), "n": torch.tensor(4)})
    assert all_finite({"w": torch.full((10,), 3e38)})
    assert not all_finite({"w": torch.tensor([float("inf"), -float("inf")])})


def test_census_tells_labels_only_when_asked(digits: Dataset) -> None:
    run = api.start(small())
    executor = Executor(
        run.config, SplitHoldings(run.dataset, run.split, run.config.run.seed), compose(run.config)
    )
    message = broadcast_of(run.state, run.config)
    assert executor.answer(Question("census"), message, 2).values == {"samples": len(run.split.device(2))}
    with deterministic():
        engine = run._engine()
        census = take_census(engine, run.state, run.config, "counts")
    np.testing.assert_array_equal(census.samples, run.split.sizes)
    np.testing.assert_array_equal(census.labels, run.split.counts(digits.train_labels, 10))
    with pytest.raises(FeddumapError, match="unknown question 'secrets'"):
        executor.answer(Question("secrets"), message, 2)


def test_test_images_never_reach_the_server(home: object) -> None:
    """The server's samples are training images it was given, and none that a device holds."""
    run = api.start(small())
    context = run._context(run._engine())
    assert len(context.server) == len(run.split.server)
    held = {int(index) for device in range(6) for index in run.split.device(device)}
    assert not held & set(run.split.server.tolist())
    fields = set(context.__dataclass_fields__)
    assert fields == {"config", "server", "census", "clock", "progress", "validation", "secret"}
    assert context.validation is None  # training images too, if there are any: see test_validation


def test_target_stops_the_run(home: object) -> None:
    config = small(train={"rounds": 8})
    full = api.train(config)
    values = [record["accuracy"] for record in full.records]
    run = api.train(config.replace(run={"target": max(values[:4]), "targets": [0.01, 1.0]}))
    assert run.state.round < 8
    assert run.records == [
        {**record, "wall": mine["wall"]} for record, mine in zip(full.records, run.records, strict=False)
    ]
    targets = run.summary["targets"]
    assert targets["0.01"] == {"round": 0, "clock": run.records[0]["clock"]}
    assert targets["1.0"] is None
    assert len(targets) == 3


def test_iterating_and_callbacks(home: object) -> None:
    seen: list[int] = []
    ticks: list[tuple[str, int, int]] = []
    run = api.start(small())
    for record in run.iterate(lambda *tick: ticks.append(tick)):
        seen.append(record["round"])
    assert seen == [0, 1, 2]
    assert ticks == [("devices", done, 3) for done in (1, 2, 3)] * 3
    called = api.train(small(), on_round=lambda record: seen.append(record["round"]))
    assert seen == [0, 1, 2, 0, 1, 2]
    assert digest(called.state.weights) == digest(run.state.weights)
    assert called.model()(torch.zeros(1, 1, 16, 16)).shape == (1, 10)


def test_a_model_of_ones_own_runs_by_its_import_name(home: object) -> None:
    config = small(
        model={"name": "tests.support.own_model:make"}, clock={"train_seconds": 2.0}, run={"workers": 2}
    )
    run = api.train(config)
    assert run.state.architecture.widths == {"0": 8, "3": 12}
    assert run.records[-1]["accuracy"] is not None
