"""FedDUMAP-C: FedDUMAP with other defaults; FedDUMAP-CS: with a few of the server's samples on devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from feddumap import run as api
from feddumap.config import Config, MethodConfig
from feddumap.core.tensors import digest
from feddumap.data.label_mix import divergence
from feddumap.methods.feddu import degree_of_devices, effective_share
from feddumap.methods.registry import RECIPES, compose, resolve
from tests.conftest import small

PRUNED = {"prune_round": 1, "rate_nodes": "server"}
CALIBRATED = ("feddumap-c", "feddumap-cs")


def of(name: str, tau: float | None = None, **keys: Any) -> Config:
    train = {"rounds": 2, "lr": 0.1} | ({} if tau is None else {"calibration": tau})
    return small(method={"name": name, **PRUNED, **keys}, data={"server_fraction": 0.2}, train=train)


def test_it_is_feddumap_with_other_defaults(home: object) -> None:
    own, same = api.train(of("feddumap-c")), api.train(of("feddumap", 1.0, c=0.35, degree="device"))
    assert digest(own.state.weights) == digest(same.state.weights)
    assert own.config.train.calibration == 1.0
    plain = api.train(of("feddumap"))
    assert plain.config.train.calibration == 0.0
    assert digest(plain.state.weights) != digest(own.state.weights)


def test_the_configuration_goes_before_the_methods_calibration(home: object) -> None:
    run, plain = api.train(of("feddumap-c", 0.0)), api.train(of("feddumap", c=0.35, degree="device"))
    assert run.config.train.calibration == 0.0
    assert digest(run.state.weights) == digest(plain.state.weights)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in CALIBRATED])
def test_all_other_methods_are_plain_by_default(name: str) -> None:
    assert compose(small(method={"name": name})).calibration == 0.0


def test_its_share_is_about_the_papers_in_the_papers_setting() -> None:
    """100 devices of two of ten labels, ten a round, a server with five: the mean over cohorts of
    α / (1 − acc) is within a fifth of the paper's, and it is positive when all devices take part."""
    rng = np.random.default_rng(0)
    shards = rng.permutation(np.repeat(np.arange(10), 20)).reshape(100, 2)
    labels = np.zeros((100, 10), dtype=np.int64)
    for device, pair in enumerate(shards):
        np.add.at(labels[device], pair, 200)
    server = 4000, float(divergence(np.repeat([0, 800], 5), labels.sum(axis=0)))

    def mean(degree: Any, c: float) -> float:
        cohorts = [rng.choice(100, 10, replace=False) for _ in range(300)]
        shares = (
            effective_share(0.0, server, (4000, degree_of_devices(labels, cohort, degree)), c, "one_minus")
            for cohort in cohorts
        )
        return float(np.mean(list(shares)))

    assert mean("device", 0.35) == pytest.approx(mean("cohort", 1.0), rel=0.2)
    everyone = degree_of_devices(labels, range(100), "device")
    assert effective_share(0.0, server, (40_000, everyone), 0.35, "one_minus") > 0.01


def test_without_its_parts_the_shared_variant_is_data_sharing(home: object) -> None:
    """No server update, no momentum, no pruning: FedAvg on the union, calibrated, to the bit."""
    off = {"c": 0.0, "server_momentum": 0.0, "device_momentum": 0.0, "prune_round": 9}
    own = api.train(of("feddumap-cs", shared_samples=7, **off))
    plain = {"name": "data-sharing", "shared_samples": 7, "transfer_on_clock": True}
    same = api.train(of("feddumap", 1.0).model_copy(update={"method": small(method=plain).method}))
    assert digest(own.state.weights) == digest(same.state.weights)
    costs = ("clock", "samples", "bytes_up")
    assert [[record[key] for key in costs] for record in own.records] == [
        [record[key] for key in costs] for record in same.records
    ]


def test_shared_samples_are_sent_once_and_timed(home: object) -> None:
    """Against FedDUMAP-C: 7 samples more on each device, their bytes and the time to send them in round 0."""
    without, with_them = api.train(of("feddumap-c")), api.train(of("feddumap-cs", shared_samples=7))
    for before, after in zip(without.records, with_them.records, strict=True):
        assert after["samples"] == before["samples"] + 7 * len(before["devices"])
    sizes = [run.records[0]["bytes_down"] for run in (without, with_them)]
    image = with_them.dataset.train_inputs[0].nbytes + 1
    assert sizes[1] - sizes[0] == 7 * image * 6  # all six devices
    on_clock = with_them._clock.transfer(range(6), 7 * image)
    untimed = api.train(of("feddumap-cs", shared_samples=7, transfer_on_clock=False))
    assert with_them.records[0]["clock"] == pytest.approx(untimed.records[0]["clock"] + on_clock)
    assert on_clock > 0
    assert digest(untimed.state.weights) == digest(with_them.state.weights)


def test_the_defaults_of_the_shared_variant() -> None:
    """Its defaults: a hundred samples, on the clock, a shorter server's part, else as FedDUMAP-C."""
    found, plain = (compose(small(method={"name": name})) for name in ("feddumap-cs", "feddumap-c"))
    assert (found.shared, found.shared_on_clock, found.calibration) == (100, True, 1.0)
    assert (plain.shared, plain.shared_on_clock) == (0, False)
    own, others = (dict(resolve(MethodConfig(name=name)).settings) for name in ("feddumap-cs", "feddumap-c"))
    assert own.pop("decay") == 0.98
    assert others.pop("decay") == 0.999
    shared = {"shared_samples": 100, "transfer_on_clock": True}
    assert own == {**others, **shared}
