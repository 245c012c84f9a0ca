"""FedDUMAP-C: FedDUMAP with other defaults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.tensors import digest
from feddumap.data.label_mix import divergence
from feddumap.methods.feddu import degree_of_devices, effective_share
from feddumap.methods.registry import RECIPES, compose
from tests.conftest import small

PRUNED = {"prune_round": 1, "rate_nodes": "server"}


def of(name: str, taus: tuple[float, ...] = (), **keys: Any) -> Config:
    """Two rounds of a pruned method; `taus` are those of the devices and of the server."""
    calibration = dict(zip(("calibration", "server_calibration"), taus, strict=False))
    return small(
        method={"name": name, **PRUNED, **keys},
        data={"server_fraction": 0.2},
        train={"rounds": 2, "lr": 0.1, **calibration},
    )


def trained(config: Config) -> str:
    return digest(api.train(config).state.weights)


def test_it_is_feddumap_with_other_defaults(home: object) -> None:
    own = api.train(of("feddumap-c"))
    assert (own.config.train.calibration, own.config.train.server_calibration) == (0.5, 1.0)
    assert digest(own.state.weights) == trained(of("feddumap", (0.5, 1.0), c=0.35, degree="device"))
    plain = api.train(of("feddumap"))
    assert (plain.config.train.calibration, plain.config.train.server_calibration) == (0.0, 0.0)
    assert digest(plain.state.weights) != digest(own.state.weights)


def test_the_configuration_goes_before_the_methods_calibration(home: object) -> None:
    run = api.train(of("feddumap-c", (0.0, 0.0)))
    assert (run.config.train.calibration, run.config.train.server_calibration) == (0.0, 0.0)
    assert digest(run.state.weights) == trained(of("feddumap", c=0.35, degree="device"))


def test_the_server_is_calibrated_as_the_devices_unless_it_is_said(home: object) -> None:
    assert trained(of("feddumap", (1.0,))) == trained(of("feddumap", (1.0, 1.0)))
    assert trained(of("feddumap", (1.0,))) != trained(of("feddumap", (1.0, 0.0)))


def test_the_servers_calibration_concerns_only_the_server(home: object) -> None:
    """FedAP's server does not train, FedDUAP's does."""
    assert trained(of("fedap", (0.5, 1.0))) == trained(of("fedap", (0.5, 0.0)))
    assert trained(of("fedduap", (0.5, 1.0))) != trained(of("fedduap", (0.5, 0.0)))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "feddumap-c"])
def test_all_other_methods_are_plain_by_default(name: str) -> None:
    algorithm = compose(small(method={"name": name}))
    assert (algorithm.calibration, algorithm.server_calibration) == (0.0, None)


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
