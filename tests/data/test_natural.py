"""The natural partition against a plain loop, and flwr-datasets' partitioners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from feddumap.config import DataConfig
from feddumap.core.rng import stream
from feddumap.data.partition import Split, resolve, split, validation
from feddumap.errors import FeddumapError

RNG = np.random.default_rng(3)
USERS = RNG.integers(0, 12, 300)
USERS[USERS == 7] = 6  # user 7 has test samples only
LABELS = RNG.integers(0, 4, 300)


def natural(**keys: Any) -> DataConfig:
    return DataConfig(partition="natural", **{"server_fraction": 0.05, "server_classes": 2, **keys})


def test_devices_are_users_and_a_fifth_is_the_pool() -> None:
    made = split(LABELS, 4, natural(), 5, USERS)
    known = sorted(set(USERS.tolist()))
    assert made.devices == len(known) == 11
    for k, user in enumerate(known):
        own = np.flatnonzero(user == USERS)
        held = made.device(k)
        assert set(USERS[held]) == {user}
        assert len(held) == len(own) - len(own) // 5
        assert (np.diff(held) > 0).all()
    assert len(made.server) == round(0.05 * len(made.indices))
    assert len(np.unique(LABELS[made.server])) == 2
    assert not np.intersect1d(made.server, made.indices).size
    Split.from_arrays(made.to_arrays(), 300)


def test_samples_without_a_user_are_the_pool() -> None:
    users = np.where(np.arange(300) % 6 == 0, -1, USERS)
    made = split(LABELS, 4, natural(), 5, users)
    np.testing.assert_array_equal(np.sort(made.indices), np.flatnonzero(users >= 0))
    assert (users[made.server] == -1).all()
    held = validation(LABELS, 4, natural(validation=4), made, 5, users)
    assert (users[held] == -1).all()
    assert not np.intersect1d(held, made.server).size


def test_every_user_keeps_a_sample() -> None:
    users = np.arange(20)
    made = split(np.arange(20) % 2, 2, natural(server_fraction=0.0), 5, users)
    assert made.sizes.tolist() == [1] * 20


def test_fewer_devices_are_drawn_by_the_seed() -> None:
    whole = split(LABELS, 4, natural(server_fraction=0.0), 5, USERS)
    chosen = []
    for seed in range(5):
        made = split(LABELS, 4, natural(devices=4, server_fraction=0.0), seed, USERS)
        users = [int(USERS[made.device(k)[0]]) for k in range(4)]
        assert users == sorted(set(users))
        expected = np.sort(stream(seed, "partition", "users").permutation(np.unique(USERS))[:4])
        assert users == expected.tolist()
        chosen.append(tuple(users))
    assert len(set(chosen)) > 1
    assert whole.devices == 11


def test_the_default_number_of_devices() -> None:
    assert resolve(natural(), 4, LABELS, USERS).devices == 11
    assert resolve(natural(devices=3), 4, LABELS, USERS).devices == 3
    assert resolve(DataConfig(), 4, LABELS, USERS).devices == 100


@pytest.mark.parametrize(
    ("keys", "users", "message"),
    [
        ({"devices": 12}, USERS, "data.devices = 12: expected at most 11, the number of users"),
        ({}, None, "data.partition = 'natural': the data set does not say whose each sample is"),
        ({}, np.full(300, -1), "no training sample has a user"),
        ({"size_spread": 0.5}, USERS, "data.size_spread = 0.5: expected 0 with data.partition = 'natural'"),
        ({"server_fraction": 0.9}, USERS, "data.server_fraction = 0.9: expected at most .*without a user"),
        ({"partitioner": {"alpha": 1.0}}, USERS, r"\[data.partitioner\]: expected none"),
    ],
)
def test_mistakes(keys: dict[str, Any], users: np.ndarray | None, message: str) -> None:
    with pytest.raises(FeddumapError, match=message):
        split(LABELS, 4, natural(**keys), 5, users)


# --- flwr-datasets -------------------------------------------------------------------------------------


def flwr(name: str, devices: int | None = None, **keys: Any) -> DataConfig:
    more = {} if devices is None else {"devices": devices}
    return DataConfig(partition=f"flwr:{name}", partitioner=keys or None, server_fraction=0.05, **more)


@pytest.fixture
def _installed() -> None:
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed (extra flwr-datasets)")


@pytest.mark.extras
@pytest.mark.usefixtures("_installed")
def test_partitioners_of_flwr_datasets() -> None:
    made = split(LABELS, 4, flwr("IidPartitioner", 6), 5)
    assert made.sizes.tolist() == [40] * 6
    np.testing.assert_array_equal(np.sort(made.indices), np.arange(240))
    assert (made.server >= 240).all()
    pathological = flwr("PathologicalPartitioner", 8, num_classes_per_partition=1)
    made = split(LABELS, 4, pathological, 5)
    assert ((made.counts(LABELS, 4) > 0).sum(axis=1) == 1).all()
    dirichlet = flwr("DirichletPartitioner", 5, alpha=0.3, min_partition_size=3)
    one, other, third = (split(LABELS, 4, dirichlet, seed) for seed in (5, 5, 6))
    assert np.array_equal(one.indices, other.indices)
    assert not np.array_equal(one.indices, third.indices)


@pytest.mark.extras
@pytest.mark.usefixtures("_installed")
def test_a_partitioner_that_knows_its_devices() -> None:
    config = flwr("NaturalIdPartitioner")
    users = len(set(USERS[:240].tolist()))
    assert resolve(config, 4, LABELS, USERS).devices == users
    made = split(LABELS, 4, config, 5, USERS)
    assert made.devices == users
    assert all(len(set(USERS[made.device(k)])) == 1 for k in range(users))


@pytest.mark.extras
@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (flwr("IidPartitoner", 4), "unknown partitioner of flwr-datasets 'IidPartitoner': did you mean"),
        (flwr("Partitioner", 4), "unknown partitioner"),
        (flwr("DirichletPartitioner", 4), r"cannot be made \(.*alpha.*\): change \[data.partitioner\]"),
        (flwr("IidPartitioner", 4, beta=1), r"cannot be made \(.*beta.*\)"),
        (flwr("NaturalIdPartitioner", 3), "data.devices = 3: .* makes 11 partitions"),
        (flwr("SizePartitioner", partition_sizes=[240, 0]), r"cannot be made \(All partition sizes must"),
        (
            flwr("DirichletPartitioner", 60, alpha=0.01, min_partition_size=0),
            r"device \d+ of 60 gets no sample",
        ),
        (flwr("VerticalEvenPartitioner", 2), "data.partition = 'flwr:VerticalEvenPartitioner'"),
    ],
)
def test_mistakes_with_flwr_datasets(config: DataConfig, message: str) -> None:
    with pytest.raises(FeddumapError, match=message):
        split(LABELS, 4, config, 5, USERS)


def test_flwr_datasets_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flwr_datasets.partitioner", None)
    with pytest.raises(FeddumapError, match=r"needs the package flwr-datasets.*feddumap\[flwr-datasets\]"):
        split(LABELS, 4, flwr("IidPartitioner", 4), 5)
