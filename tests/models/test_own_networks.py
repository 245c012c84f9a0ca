"""Networks of every kind train with every kind of method, to the same bits on one and on two workers."""

from __future__ import annotations

from typing import Any

import pytest

from feddumap import run as api
from feddumap.core.tensors import all_finite, digest
from tests.support.methods import outcome, tiny
from tests.support.own_networks import KINDS, name_of

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "feddum": {},
    "scaffold": {},
    "imc": {"prune_round": 0, "rate": "fixed", "fixed_rate": 0.5},
}


def trained(network: str, method: str, workers: int) -> api.Run:
    return api.train(
        tiny(
            model={"name": name_of(network)},
            method={"name": method, **METHODS[method]},
            train={"rounds": 1, "calibration": 0.5},
            run={"workers": workers},
        )
    )


@pytest.mark.parametrize("network", KINDS)
def test_every_kind_trains(home: object, network: str) -> None:
    for method in METHODS:
        run = trained(network, method, workers=1)
        start = api.start(run.config).state
        assert all_finite({**run.state.weights, **run.state.steps}), method
        assert digest(run.state.weights) != digest(start.weights), method
        assert run.config.clock.profile == "general"
        assert run.records[0]["accuracy"] is not None


@pytest.mark.parametrize("network", KINDS)
def test_two_workers_give_the_same_bits(home: object, network: str) -> None:
    method = ("fedavg", "feddum", "scaffold", "imc")[KINDS.index(network) % 4]
    assert outcome(trained(network, method, 2))[0] == outcome(trained(network, method, 1))[0]
