"""FedAP in whole runs: before, at and after the round in which it prunes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.messages import Answer, Broadcast, Question
from feddumap.core.sampling import select
from feddumap.core.tensors import digest
from feddumap.data.label_mix import divergence
from feddumap.engine.local import LocalCohort
from feddumap.errors import FeddumapError
from feddumap.models import macs, parameters
from feddumap.models.cost import parameter_names
from feddumap.pruning import ranks, rates
from feddumap.pruning.global_rate import check_rate
from feddumap.pruning.rates import NodeRate, node_weights
from feddumap.runs.reader import read_checkpoint, read_records
from tests.conftest import small

ROUNDS, PRUNED = 4, 2
FULL = 15_626  # LeNet's parameters
NUMBERS = len(fields(NodeRate))  # that a device answers with, eight bytes each


@pytest.fixture
def quick(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer Lanczos steps, samples and images; in this process only, so with one worker."""
    monkeypatch.setattr(rates, "STEPS", 6)
    monkeypatch.setattr(rates, "SAMPLES", 16)
    monkeypatch.setattr(ranks, "IMAGES", 20)


def config(method: str = "fedap", data: dict[str, Any] | None = None, **settings: Any) -> Config:
    own = {"prune_round": PRUNED} if "ap" in method else {}
    return small(
        data=data or {}, method={"name": method, **own, **settings}, train={"rounds": ROUNDS, "batch": 64}
    )


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**record, "wall": 0} for record in records]


def digests(run: api.Run) -> list[tuple[str, str]]:
    """Train, and the bits of weights and server steps after each round."""
    return [(digest(run.state.weights), digest(run.state.steps)) for _ in run]


@pytest.mark.parametrize(
    ("pruned", "plain"), [("fedap", "fedavg"), ("fedduap", "feddu"), ("feddumap", "feddum")]
)
def test_the_rounds_before_are_those_without_pruning(quick: None, pruned: str, plain: str) -> None:
    with_, without = api.start(config(pruned)), api.start(config(plain))
    mine, theirs = digests(with_), digests(without)
    assert mine[:PRUNED] == theirs[:PRUNED]
    assert untimed(with_.records[:PRUNED]) == untimed(without.records[:PRUNED])
    assert mine[PRUNED] != theirs[PRUNED]
    assert [("pruning" in record) for record in with_.records] == [False, False, True, False]
    assert not any("pruning" in record for record in without.records)


def test_without_any_rate_the_round_is_an_error(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a pruning of nothing: the run can be resumed in that round."""
    survey = LocalCohort.survey

    def lost(self: LocalCohort, question: Question, message: Broadcast, devices: Sequence[int]) -> Any:
        if question.name != "rate":
            return survey(self, question, message, devices)
        return (Answer(device, lost="it is gone") for device in devices)

    run = api.start(config(data={"server_fraction": 0.0}))
    monkeypatch.setattr(LocalCohort, "survey", lost)
    with pytest.raises(FeddumapError, match=r"round 2: no device told its pruning rate, .*: resume when"):
        run.run()
    assert run.state.round == PRUNED


def test_the_record_of_the_pruning_round(quick: None) -> None:
    run = api.start(config())
    iterator = iter(run)
    for _ in range(PRUNED):
        next(iterator)
    before = run.state
    told = next(iterator)["pruning"]
    after = run.state.architecture
    assert [node["device"] for node in told["nodes"]] == [-1, 0, 1, 2, 3, 4, 5]
    counts = run.split.counts(run.dataset.train_labels, 10)
    server = np.bincount(run.dataset.train_labels[run.split.server], minlength=10)
    for node, mix in zip(told["nodes"], [server, *counts], strict=True):
        assert node["samples"] == mix.sum()
        assert node["degree"] == pytest.approx(float(divergence(mix, counts.sum(0))))
        assert 0 <= node["p"] <= 1
        assert (node["m"], node["d"]) == (round(node["p"] * FULL), FULL)
        assert node["lipschitz"] is None
        assert node["lambda_min"] < node["lambda_max"]
        assert not node["clamped"]
    weights = [node["weight"] for node in told["nodes"]]
    assert sum(weights) == pytest.approx(1)
    samples, degrees = zip(*((node["samples"], node["degree"]) for node in told["nodes"]), strict=True)
    assert weights == pytest.approx(node_weights(samples, degrees))
    expected = sum(node["weight"] * node["p"] for node in told["nodes"])
    assert told["rate"] == pytest.approx(expected)
    # every device found its own rate, and the mean lies between them
    found = [node["p"] for node in told["nodes"]]
    assert len(set(found)) > 3
    assert min(found) < told["rate"] < max(found)
    scalars = torch.cat([before.weights[name].flatten().abs() for name in parameter_names(after)])
    assert told["threshold"] == scalars.sort().values[int(FULL * told["rate"]) - 1]
    for name, layer in told["layers"].items():
        share = (before.weights[f"{name}.weight"].abs() < told["threshold"]).double().mean()
        assert layer["rate"] == pytest.approx(float(share))
        gone = int(layer["rate"] * layer["filters"])
        assert (len(layer["removed"]), layer["kept"]) == (gone, layer["filters"] - gone)
        assert layer["kept"] == after.widths[name]
    assert any(layer["removed"] for layer in told["layers"].values())
    assert told["parameters"] == {"before": FULL, "after": parameters(after)}
    assert told["macs"] == {"before": 44_040, "after": macs(after)}
    iterator.close()  # type: ignore[attr-defined]


def test_later_rounds_are_smaller_and_shorter(quick: None) -> None:
    run = api.train(config("feddumap", rate="fixed", fixed_rate=0.6))
    first, before, pruned, last = run.records
    assert pruned["pruning"]["nodes"] == []  # nobody is asked
    assert pruned["pruning"]["rate"] == 0.6
    left = run.state.architecture
    for record in (pruned, last):
        assert (record["macs"], record["parameters"]) == (macs(left), parameters(left))
        assert record["macs"] < before["macs"]
        assert record["bytes_down"] == record["bytes_up"] == 3 * 4 * parameters(left) < 3 * 4 * FULL
    clock = [record["clock"] for record in run.records]
    share, sent = macs(left) / 44_040, 3 * 4 * parameters(left) / 2**20  # the paper's profile
    assert clock[3] - clock[2] == pytest.approx(1.3 * share + sent * (1 / 6.25 + 1 / 12.5))
    assert clock[3] - clock[2] == pytest.approx(clock[2] - clock[1])
    assert clock[2] - clock[1] < clock[1] - clock[0] == pytest.approx(first["clock"])
    shapes = {f"1/momentum/{name}": tensor.shape for name, tensor in run.state.weights.items()}
    assert {name: tensor.shape for name, tensor in run.state.steps.items()} == shapes
    assert run.summary["macs"] == macs(left)
    assert run.model()(torch.zeros(1, 1, 16, 16)).shape == (1, 10)


@pytest.mark.parametrize("who", ["all", "selected", "server"])
def test_the_nodes_asked_are_charged(quick: None, who: str) -> None:
    run = api.train(config(rate_nodes=who).replace(train={"rounds": PRUNED + 1}))
    record = run.records[PRUNED]
    asked = {"all": list(range(6)), "selected": select(run.config, PRUNED), "server": []}[who]
    assert [node["device"] for node in record["pruning"]["nodes"]] == [-1, *asked]
    left = parameters(run.state.architecture)
    assert record["bytes_down"] == 4 * (3 * left + len(asked) * FULL)  # the survey has the whole model
    assert record["bytes_up"] == 4 * 3 * left + 8 * NUMBERS * len(asked)


def test_without_server_data_a_device_tells_the_ranks(quick: None) -> None:
    data = {"server_fraction": 0.0}
    run = api.train(config(data=data).replace(train={"rounds": PRUNED + 1}))
    record = run.records[PRUNED]
    assert [node["device"] for node in record["pruning"]["nodes"]] == list(range(6))
    left = parameters(run.state.architecture)
    assert left < FULL
    assert record["bytes_down"] == 4 * (3 * left + (6 + 1) * FULL)
    assert record["bytes_up"] == 4 * 3 * left + 6 * 8 * NUMBERS + 8 * (6 + 16)
    for method in ("feddu", "feddumap"):
        with pytest.raises(FeddumapError, match=rf"'{method}' needs images on the server.*server_fraction"):
            api.start(config(method, data=data))
    with pytest.raises(FeddumapError, match="needs images on the server"):
        api.train(config(data=data, rate_nodes="server"))


def test_a_fixed_rate_of_zero_removes_nothing(quick: None) -> None:
    run = api.start(config(rate="fixed", fixed_rate=0.0))
    plain = api.start(config("fedavg"))
    assert digests(run) == digests(plain)
    told = run.records[PRUNED]["pruning"]
    assert (told["rate"], told["threshold"]) == (0.0, 0.0)
    assert all(layer["removed"] == [] for layer in told["layers"].values())


def test_the_gap_rule_in_a_run(quick: None) -> None:
    run = api.train(config(rate="gap", max_rate=0.3).replace(train={"rounds": PRUNED + 1}))
    told = run.records[PRUNED]["pruning"]
    for node in told["nodes"]:
        assert 0 <= node["m"] <= node["d"] <= 16
        assert node["p"] == pytest.approx(min(0.3, node["m"] / node["d"]))
        assert node["clamped"] == (node["m"] / node["d"] > 0.3)
        assert node["lipschitz"] > 0
    assert told["rate"] <= 0.3 + 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": "fixed"}, r"method.rate = 'fixed' needs method.fixed_rate, a number from 0 to 1"),
        ({"rate": "fixed", "fixed_rate": 1.5}, r"method.fixed_rate = 1.5"),
        ({"rate": "steep"}, r"method.rate = 'steep'"),
        ({"prune_round": -1}, r"method.prune_round = -1"),
    ],
)
def test_bad_settings_are_refused_at_the_start(home: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FeddumapError, match=message):
        api.start(config(**settings))


@pytest.mark.parametrize("p", [None, 2.0, -0.1, float("nan"), "0.3"])
def test_a_rate_that_is_none_is_refused(p: object) -> None:
    with pytest.raises(FeddumapError, match=r"device 4 sent the pruning rate .* from 0 to 1"):
        check_rate(Answer(4, {"p": p}))
    check_rate(Answer(4, {"p": 1.0}))


def finished(directory: Path) -> tuple[str, str, dict[str, int], list[dict[str, Any]]]:
    saved = read_checkpoint(max(directory.glob("checkpoint-*.json"))).state
    bits = digest(saved.weights), digest(saved.steps)
    return *bits, saved.architecture.widths, untimed(read_records(directory))


def test_resume_around_the_pruning_gives_the_same_bits(quick: None, tmp_path: Path) -> None:
    wanted = config("feddumap")
    api.train(wanted, tmp_path / "whole")
    expected = finished(tmp_path / "whole")
    assert expected[2] != {"conv1": 6, "conv2": 16}
    for stop in (PRUNED, PRUNED + 1):  # exactly before, and exactly after
        run = api.start(wanted, tmp_path / f"stop{stop}")
        iterator = iter(run)
        for _ in range(stop):
            next(iterator)
        iterator.close()  # type: ignore[attr-defined]
        run.close()
        again = api.resume(tmp_path / f"stop{stop}")
        assert again.state.round == stop
        assert (again.state.architecture.widths == expected[2]) == (stop > PRUNED)
        again.run().close()
        assert finished(tmp_path / f"stop{stop}") == expected


def test_resume_in_the_middle_of_the_survey(quick: None, tmp_path: Path) -> None:
    wanted = config("feddumap")
    api.train(wanted, tmp_path / "whole")
    ticks: list[tuple[str, int, int]] = []

    def leave(*tick: Any) -> None:
        ticks.append(tick)
        if tick[:2] == ("pruning rates", 4):
            raise KeyboardInterrupt

    run = api.start(wanted, tmp_path / "part")
    with pytest.raises(KeyboardInterrupt):
        list(run.iterate(leave))
    run.close()
    assert ticks[-4:] == [("pruning rates", done, 7) for done in (1, 2, 3, 4)]  # 1 is the server itself
    own = [tick[1:] for tick in ticks if tick[0] == "curvature on the server's data"]
    assert own == [(step, rates.STEPS) for step in range(1, rates.STEPS + 1)]
    again = api.resume(tmp_path / "part")
    assert again.state.round == PRUNED
    list(again.iterate(lambda *tick: ticks.append(tick)))
    again.close()
    assert ("pruning rates", 7, 7) in ticks
    assert finished(tmp_path / "part") == finished(tmp_path / "whole")


def few_images(folder: Path) -> Path:
    """Four classes of squares, 15 train images each."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 4
    images = rng.integers(0, 60, (60, 32, 32, 3), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[8 * label : 8 * label + 8] += 150
    test = {"test_inputs": images[:8], "test_labels": labels[:8]}
    np.savez(folder / "few.npz", train_inputs=images, train_labels=labels, **test)
    return folder / "few.npz"


def test_workers_do_not_change_a_bit(home: Path, tmp_path: Path) -> None:
    """Real settings: worker processes see no patches."""
    wanted = config("feddumap").replace(
        data={
            "name": str(few_images(tmp_path)),
            "devices": 4,
            "server_fraction": 0.2,
            "shards_per_device": 1,
        },
        train={"rounds": 3, "cohort": 2},
    )
    runs = [api.start(wanted.replace(run={"workers": workers})) for workers in (1, 2)]
    one, two = (digests(run) for run in runs)
    assert one == two
    assert untimed(runs[0].records) == untimed(runs[1].records)
    assert len(runs[0].records[PRUNED]["pruning"]["nodes"]) == 5
    assert runs[0].state.architecture == runs[1].state.architecture
    assert runs[0].records[-1]["parameters"] < runs[0].records[0]["parameters"]


def grouped(classes: int) -> nn.Module:
    """Normalisation over groups of channels, which one channel less would break."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=4), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, classes)
    )


def test_a_network_that_cannot_be_cut_is_refused_before_training(home: object) -> None:
    for name in ("fedap", "hrank"):
        keys = {"model": {"name": "tests.methods.test_fedap:grouped"}, "clock": {"train_seconds": 1.0}}
        with pytest.raises(FeddumapError, match=r"can be pruned \(0: .* 1, which normalises in 4 groups\)"):
            api.start(small(method={"name": name}, **keys))
    api.start(small(**keys))  # without pruning it may train


def test_a_pruning_that_never_comes_is_said(home: object) -> None:
    said: list[str] = []
    next(iter(api.start(small(method={"name": "fedap"}), say=said.append)))
    assert any("method.prune_round = 30 is not reached in 3 rounds" in line for line in said)
    said.clear()
    api.start(small(method={"name": "fedap", "prune_round": 2}), say=said.append)
    assert not any("prune_round" in line for line in said)
