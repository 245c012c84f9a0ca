"""Splits: who holds what, checked against slow oracles and for every kind of partition."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddumap.config import DataConfig
from feddumap.core.rng import stream
from feddumap.data.label_mix import divergence, non_iid_degree
from feddumap.data.partition import Split, requested_server_images, resolve, split
from feddumap.errors import FeddumapError

KINDS = ("shards", "iid", "dirichlet")


def balanced(samples: int, classes: int, seed: int = 0) -> np.ndarray:
    """Labels in random order whose first 80 % and last 20 % both hold every class equally often."""
    rng = np.random.default_rng(seed)
    cut = samples * 4 // 5
    return np.concatenate([rng.permutation(np.arange(part) % classes) for part in (cut, samples - cut)])


CIFAR = balanced(50_000, 10)


def same(a: Split, b: Split) -> bool:
    return all(np.array_equal(a.to_arrays()[name], b.to_arrays()[name]) for name in a.to_arrays())


CONFIGS = st.builds(
    lambda kind, devices, alpha, spread, fraction, classes: DataConfig(
        partition=kind,
        devices=devices,
        alpha=alpha,
        size_spread=0.0 if kind == "shards" else spread,
        server_fraction=fraction,
        server_classes=classes,
    ),
    st.sampled_from(KINDS),
    st.integers(1, 150),
    st.sampled_from([0.01, 0.1, 0.5, 1.0, 100.0]),
    st.sampled_from([0.0, 0.3, 3.0]),
    st.sampled_from([0.0, 0.01, 0.02]),
    st.integers(1, 5),
)


@settings(max_examples=80, deadline=None)
@given(CONFIGS, st.integers(0, 2**63 - 1), st.integers(500, 700))
def test_properties_of_every_split(config: DataConfig, seed: int, samples: int) -> None:
    labels = np.random.default_rng(samples).integers(0, 5, samples)
    cut = samples * 4 // 5
    made = split(labels, 5, config, seed)
    assert made.devices == config.devices
    assert (made.sizes >= 1).all()
    np.testing.assert_array_equal(np.sort(made.indices), np.arange(cut))  # each pool image exactly once
    np.testing.assert_array_equal(np.concatenate([made.device(k) for k in range(made.devices)]), made.indices)
    assert len(made.server) == len(np.unique(made.server)) == round(config.server_fraction * cut)
    assert (made.server >= cut).all()
    assert (made.server < samples).all()
    assert all(array.dtype == np.int64 for array in made.to_arrays().values())
    assert same(made, split(labels, 5, config, seed))
    assert same(made, Split.from_arrays(made.to_arrays(), samples))
    slow = [np.bincount(labels[made.device(k)], minlength=5) for k in range(made.devices)]
    np.testing.assert_array_equal(made.counts(labels, 5), slow)


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_differ_and_the_global_generator_does_not_matter(kind: Any) -> None:
    config = DataConfig(partition=kind)
    np.random.seed(5)
    one, other = split(CIFAR, 10, config, 1), split(CIFAR, 10, config, 2)
    np.random.seed(6)
    assert same(one, split(CIFAR, 10, config, 1))
    assert not np.array_equal(one.indices, other.indices)
    assert not np.array_equal(one.server, other.server)


def test_server_images_do_not_depend_on_the_devices() -> None:
    servers = [split(CIFAR, 10, DataConfig(partition=kind, devices=50), 7).server for kind in KINDS]
    np.testing.assert_array_equal(servers[0], servers[1])
    np.testing.assert_array_equal(servers[0], servers[2])


def test_shards_equal_a_literal_loop() -> None:
    made = split(CIFAR, 10, DataConfig(devices=30), 777)
    shards = np.array_split(np.argsort(CIFAR[:40_000], kind="stable"), 30 * 2)
    dealt = stream(777, "partition", "shards").permutation(60)
    for k in range(30):
        expected = np.concatenate([shards[shard] for shard in dealt[2 * k : 2 * k + 2]])
        np.testing.assert_array_equal(made.device(k), expected)


@pytest.mark.parametrize(("classes", "size", "held"), [(10, 400, 2), (100, 400, 20)])
def test_the_paper_setting(classes: int, size: int, held: int) -> None:
    labels = balanced(50_000, classes)
    made = split(labels, classes, DataConfig(), 777)
    counts = made.counts(labels, classes)
    assert (made.sizes == size).all()
    assert ((counts > 0).sum(axis=1) <= held).all()  # equal classes: no shard crosses a label boundary
    assert (counts % (size // held) == 0).all()


@pytest.mark.parametrize(
    ("held", "fraction", "degree"), [(2, 0.05, 0.6100), (2, 0.1, 0.6100), (5, 0.1, 0.3113), (10, 0.1, 0.0)]
)
def test_server_degree(held: int, fraction: float, degree: float) -> None:
    config = DataConfig(server_classes=held, server_fraction=fraction)
    made = split(CIFAR, 10, config, 777)
    server = np.bincount(CIFAR[made.server], minlength=10)
    assert set(server.tolist()) <= {0, min(1000, round(fraction * 40_000) // held)}
    assert np.count_nonzero(server) == held
    assert round(non_iid_degree(server, made.counts(CIFAR, 10)), 4) == degree


def test_server_default_is_half_of_the_classes_and_the_remainder_is_spread() -> None:
    made = split(CIFAR, 10, DataConfig(server_fraction=0.01), 3)
    assert np.count_nonzero(np.bincount(CIFAR[made.server])) == 5
    uneven = split(CIFAR, 10, DataConfig(server_fraction=403 / 40_000), 3)
    assert sorted(np.bincount(CIFAR[uneven.server], minlength=10).tolist()) == [0] * 5 + [80, 80, 81, 81, 81]


def test_a_smaller_server_share_is_part_of_a_larger_one() -> None:
    shares = [split(CIFAR, 10, DataConfig(server_fraction=p), 3).server for p in (0.01, 0.05, 0.1)]
    assert set(shares[0]) < set(shares[1]) < set(shares[2])


def test_server_classes_are_drawn_anew_for_each_seed_and_nested_for_one() -> None:
    def held(classes: int, seed: int) -> frozenset[int]:
        config = DataConfig(server_fraction=0.01, server_classes=classes)
        return frozenset(CIFAR[split(CIFAR, 10, config, seed).server].tolist())

    assert held(2, 3) < held(5, 3) < held(8, 3)
    assert len({held(5, seed) for seed in range(8)}) > 4
    assert frozenset.union(*(held(5, seed) for seed in range(8))) == set(range(10))


def test_no_server_data() -> None:
    assert split(CIFAR, 10, DataConfig(server_fraction=0.0), 3).server.shape == (0,)


def test_iid_devices_are_alike() -> None:
    made = split(CIFAR, 10, DataConfig(partition="iid"), 777)
    counts = made.counts(CIFAR, 10)
    assert (made.sizes == 400).all()
    # 8 ln 2 · n · D_JS is about χ² with 9 degrees of freedom: a mean of 9 / (8 · 400 · ln 2) = 0.0041
    assert 0.003 < divergence(counts, counts.sum(axis=0)).mean() < 0.005


def test_dirichlet_concentration_orders_the_degree() -> None:
    degrees = []
    for alpha in (0.01, 0.1, 1.0, 100.0):
        made = split(CIFAR, 10, DataConfig(partition="dirichlet", alpha=alpha), 777)
        assert (made.sizes == 400).all()
        counts = made.counts(CIFAR, 10)
        degrees.append(float(divergence(counts, counts.sum(axis=0)).mean()))
    assert degrees == sorted(degrees, reverse=True)
    assert degrees[0] > 0.6
    assert degrees[-1] < 0.01


def test_dirichlet_has_the_moments_of_its_law() -> None:
    # The share of a class has variance (C − 1) / (C² (C α + 1)), plus the multinomial's E[P (1 − P)] / n;
    # giving out every image ties the devices together only weakly when there are many.
    labels, classes, alpha, size = balanced(500_000, 10), 10, 0.5, 400
    made = split(labels, classes, DataConfig(partition="dirichlet", alpha=alpha, devices=1000), 777)
    share = made.counts(labels, classes) / made.sizes[:, None]
    variance = (classes - 1) / (classes**2 * (classes * alpha + 1))
    expected = variance + (1 / classes - 1 / classes**2 - variance) / size
    assert share.var() == pytest.approx(expected, rel=0.08)


def test_dirichlet_copes_with_rare_classes() -> None:
    labels = np.concatenate([np.zeros(900, int), np.ones(90, int), np.full(10, 2)])
    labels = np.random.default_rng(0).permutation(labels)
    made = split(labels, 4, DataConfig(partition="dirichlet", alpha=0.01, server_fraction=0.0), 1)
    np.testing.assert_array_equal(made.counts(labels, 4).sum(axis=0), np.bincount(labels[:800], minlength=4))


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_size_spread_is_log_normal(kind: Any) -> None:
    labels = balanced(1_000_000, 10)
    made = split(labels, 10, DataConfig(partition=kind, devices=2000, size_spread=0.5), 777)
    assert made.sizes.sum() == 800_000
    assert np.log(made.sizes).std() == pytest.approx(0.5, rel=0.05)
    weight = stream(777, "partition", "sizes").lognormal(0.0, 0.5, 2000)
    assert (
        np.abs(made.sizes - 800_000 * weight / weight.sum()).max() < 1
    )  # largest remainder: within one image


@pytest.mark.parametrize("devices", [39_999, 40_000, 1])
def test_size_spread_at_the_limits(devices: int) -> None:
    made = split(CIFAR, 10, DataConfig(partition="iid", devices=devices, size_spread=3.0), 777)
    assert made.sizes.sum() == 40_000
    assert made.sizes.min() >= 1


def test_a_hundred_thousand_devices() -> None:
    labels = balanced(500_000, 10)
    config = DataConfig(partition="dirichlet", alpha=0.1, devices=100_000, size_spread=1.0)
    made = split(labels, 10, config, 777)
    counts = made.counts(labels, 10)
    np.testing.assert_array_equal(counts.sum(axis=1), made.sizes)
    assert made.sizes.min() >= 1


def test_resolve_fills_the_defaults_and_keeps_what_is_set() -> None:
    assert [resolve(DataConfig(), classes).shards_per_device for classes in (2, 10, 100)] == [2, 2, 20]
    assert [resolve(DataConfig(), classes).server_classes for classes in (1, 10, 100)] == [1, 5, 50]
    given_values = DataConfig(shards_per_device=7, server_classes=3)
    assert resolve(given_values, 10) == given_values


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"devices": 40_001, "partition": "iid"}, "data.devices = 40001: expected at most 40000"),
        ({"devices": 3000, "shards_per_device": 20}, "data.shards_per_device = 20: expected at most 13,"),
        ({"size_spread": 0.5}, "data.size_spread = 0.5: .* use iid or dirichlet"),
        ({"server_classes": 11}, "data.server_classes = 11: expected at most 10"),
        ({"server_fraction": 0.3}, "data.server_fraction = 0.3: expected at most 0.25"),
        ({"server_fraction": 1e-6}, "data.server_fraction = 1e-06: gives no image"),
    ],
)
def test_impossible_splits_say_what_to_do(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(FeddumapError, match=message):
        split(CIFAR, 10, DataConfig(**keys), 777)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5))
def test_a_server_that_asks_for_more_than_its_classes_have_stays_balanced(seed: int, held: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 5, 600)
    config = DataConfig(devices=5, server_fraction=0.25, server_classes=held)
    server = np.bincount(labels[split(labels, 5, config, seed).server], minlength=5)
    fewest = min(np.bincount(labels[480:], minlength=5)[server > 0])
    assert np.count_nonzero(server) == held
    assert server.sum() <= requested_server_images(config, 480) == 120
    assert set(server[server > 0]) <= {fewest, 120 // held}


def test_a_server_class_without_images_is_refused() -> None:
    labels = np.sort(balanced(1000, 10))  # the last 20 % hold two classes only
    with pytest.raises(FeddumapError, match=r"data.server_classes = 5: class \d has no image"):
        split(labels, 10, DataConfig(devices=5), 777)


@pytest.mark.parametrize(
    "labels",
    [np.array([0, 1, 5]), np.array([-1, 0]), np.array([0.0, 1.0]), np.zeros((2, 2), int), np.array([], int)],
)
def test_labels_out_of_range_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(FeddumapError, match="labels"):
        split(labels, 5, DataConfig(devices=1, partition="iid"), 777)


def test_a_device_that_does_not_exist() -> None:
    made = split(CIFAR, 10, DataConfig(), 777)
    for k in (-1, 100):
        with pytest.raises(IndexError, match=f"device {k}"):
            made.device(k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": np.array([0, 1, 2], np.int32)}, "indices is 1-d int32"),
        ({"server": np.array([[3]])}, "server is 2-d"),
        ({"offsets": np.array([0, 2, 1, 3])}, "offsets"),
        ({"offsets": np.array([0, 3, 3])}, "offsets"),
        ({"offsets": np.array([0, 2])}, "offsets"),
        ({"offsets": np.array([1, 2, 3])}, "offsets"),
        ({"offsets": np.array([0])}, "offsets"),
        ({"offsets": np.array([], np.int64)}, "offsets"),
        ({"indices": np.array([0, 1, 5])}, "indices span 0 to 5, expected 0 to 4"),
        ({"server": np.array([-1])}, "indices span -1"),
        ({"server": np.array([1])}, "image 1 is held 2 times"),
        ({"indices": np.array([0, 2, 2])}, "image 2 is held 2 times"),
        ({"more": np.array([1])}, "more"),
    ],
)
def test_damaged_arrays_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    good = {"indices": np.array([0, 1, 2]), "offsets": np.array([0, 2, 3]), "server": np.array([4])}
    assert same(Split.from_arrays(good, 5), Split(good["indices"], good["offsets"], good["server"]))
    with pytest.raises(FeddumapError, match=message):
        Split.from_arrays({**good, **change}, 5)


def test_a_missing_array_is_refused() -> None:
    with pytest.raises(FeddumapError, match="expected indices, offsets, server"):
        Split.from_arrays({"indices": np.array([0])}, 5)
