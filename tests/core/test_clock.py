"""The virtual clock: the paper's seconds, and a fleet checked device by device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddumap.config import ClockConfig
from feddumap.core.clock import BLOCK, TRAIN_SECONDS, Fleet, PaperClock, Timing, Work, build, resolve
from feddumap.errors import FeddumapError

# family: parameters and forward multiply-adds with 10 classes
MODELS = {
    "cnn": (122_570, 4_548_608),
    "lenet": (62_006, 651_720),
    "vgg11": (9_750_922, 153_293_824),
    "resnet18": (11_178_762, 555_422_720),
}
HEADER = "device,macs_per_second,down_mbit,up_mbit\n"


def work(
    macs: int = 100,
    full: int = 100,
    down: int = 0,
    up: int = 0,
    samples: Sequence[int] = (1,),
    times: int = 1,
) -> Work:
    counts = np.array(samples, dtype=np.int64)
    return Work(macs, full, down, up, times * counts, counts)


def paper_round(family: str, factor: int = 1) -> Work:
    parameters, macs = MODELS[family]
    size = 4 * parameters * factor
    return work(macs, macs, size, size, [2000] * 10)


def fleet(keys: dict[str, Any], devices: int = 3, seed: int = 777) -> Fleet:
    clock = build(ClockConfig(profile="general", **keys), "cnn", devices, seed)
    assert isinstance(clock, Fleet)
    return clock


@pytest.mark.parametrize("family", sorted(MODELS))
def test_paper_formula(family: str) -> None:
    timing = build(ClockConfig(), family, 100, 777).round(range(10), paper_round(family))
    expected = TRAIN_SECONDS[family] + 10 * 4 * MODELS[family][0] / 2**20 * (1 / 6.25 + 1 / 12.5)
    assert timing.seconds == pytest.approx(expected, rel=1e-12)
    assert timing.finished == tuple(range(10))
    assert timing.dropped == ()


@pytest.mark.parametrize(
    ("family", "seconds", "rounds", "total"), [("cnn", 3.4222, 245, 838), ("vgg11", 97.2724, 164, 15953)]
)
def test_published_fedavg_times(family: str, seconds: float, rounds: int, total: int) -> None:
    timing = build(ClockConfig(), family, 100, 777).round(range(10), paper_round(family))
    assert round(timing.seconds, 4) == seconds
    assert round(rounds * timing.seconds) == total


def test_pruning_slowdown_and_bytes_act_on_their_own_terms() -> None:
    parameters, macs = MODELS["cnn"]
    train, size = 2.3, 4 * parameters
    send = 10 * size / 2**20 * 0.24
    clock = build(ClockConfig(), "cnn", 100, 777)

    def seconds(macs_now: int, down: int, up: int, times: int = 1) -> float:
        return clock.round(range(10), work(macs_now, macs, down, up, [2000] * 10, times)).seconds

    assert seconds(macs // 2, size, size) == pytest.approx(train / 2 + send)
    assert seconds(macs, size, size, times=6) == pytest.approx(6 * train + send)
    assert seconds(macs, 2 * size, 2 * size) == pytest.approx(train + 2 * send)  # FedDA
    assert seconds(macs, size, 2 * size) == pytest.approx(train + 1.5 * send)
    assert seconds(macs, size, 3 * size) == seconds(macs, 3 * size, size)
    assert clock.transfer(range(100), size) == pytest.approx(10 * send / 2)


def test_paper_needs_a_known_family_or_a_time() -> None:
    with pytest.raises(FeddumapError, match=r"'mine'.* set clock.train_seconds or clock.profile = 'general'"):
        build(ClockConfig(profile="paper"), "mine", 100, 777)
    clock = build(ClockConfig(train_seconds=4.5), "mine", 100, 777)
    assert clock.round([3], work()).seconds == 4.5
    assert build(ClockConfig(train_seconds=4.5), "cnn", 100, 777) == PaperClock(4.5)


@pytest.mark.parametrize(
    ("keys", "family", "profile"),
    [
        ({}, "cnn", "paper"),
        ({}, "lenet", "paper"),
        ({}, "vgg11", "paper"),
        ({}, "resnet18", "paper"),
        ({}, "mlp", "general"),
        ({}, "my_nets:make", "general"),
        ({"train_seconds": 2.0}, "my_nets:make", "paper"),
        ({"profile": "general"}, "cnn", "general"),
        ({"profile": "paper"}, "my_nets:make", "paper"),
    ],
)
def test_the_profile_that_is_meant(keys: dict[str, Any], family: str, profile: str) -> None:
    assert resolve(ClockConfig(**keys), family) == ClockConfig(**{**keys, "profile": profile})


def test_a_network_without_a_time_gets_a_fleet() -> None:
    assert isinstance(build(ClockConfig(), "my_nets:make", 5, 777), Fleet)
    assert build(ClockConfig(), "cnn", 5, 777) == PaperClock(2.3)


@pytest.mark.parametrize(
    "keys",
    [
        {"profile": "paper", "deadline": 3.0},
        {"profile": "paper", "fleet": "fleet.csv"},
        {"profile": "general", "train_seconds": 3.0},
    ],
)
def test_a_key_of_the_other_profile_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(FeddumapError, match=f"clock.{list(keys)[1]} = .*profile = '{keys['profile']}'"):
        build(ClockConfig(**keys), "cnn", 100, 777)


def test_general_equals_the_formula_device_by_device() -> None:
    clock = fleet({"macs_per_second": 1e9, "down_mbit": 8.0, "up_mbit": 4.0, "spread": 0.7})
    chosen, samples = [2, 0], [50, 20]
    expected = [
        3_000_000 / clock.down[k] + 3 * 1_000_000 * n / clock.speed[k] + 1_000_000 / clock.up[k]
        for k, n in zip(chosen, samples, strict=True)
    ]
    job = work(1_000_000, 9_000_000, 3_000_000, 1_000_000, samples)
    np.testing.assert_allclose(clock.seconds(chosen, job), expected, rtol=1e-12)
    assert clock.round(chosen, job) == Timing(float(clock.seconds(chosen, job).max()), (2, 0), ())


def test_without_spread_all_devices_are_the_median() -> None:
    clock = fleet({"macs_per_second": 1e9, "down_mbit": 8.0, "up_mbit": 4.0, "spread": 0.0})
    # 8 Mbit/s is 10^6 bytes a second: 2 s down, 3 · 10^6 · 1000 / 10^9 = 3 s of training, 2 s up
    timing = clock.round([0, 1, 2], work(1_000_000, 1_000_000, 2_000_000, 1_000_000, [1000] * 3))
    assert timing.seconds == pytest.approx(7.0)


def test_spread_is_log_normal_around_the_medians() -> None:
    clock = fleet({"spread": 0.5}, devices=20_000)
    for values, median in [(clock.speed, 1e10), (clock.down, 50e6 / 8), (clock.up, 20e6 / 8)]:
        logs = np.log(values)
        assert np.median(logs) == pytest.approx(np.log(median), abs=0.02)
        assert logs.std() == pytest.approx(0.5, rel=0.03)
    correlation = np.corrcoef(np.log([clock.speed, clock.down, clock.up]))
    assert np.abs(correlation - np.eye(3)).max() < 0.03


def test_a_device_keeps_its_speed_in_a_larger_fleet_and_changes_with_the_seed() -> None:
    small, large, other = fleet({}, 10), fleet({}, 100_000), fleet({}, 10, seed=778)
    for name in ("speed", "down", "up"):
        values = getattr(large, name)
        assert values.shape == (100_000,)
        np.testing.assert_array_equal(getattr(small, name), values[:10])
        assert not (getattr(small, name) == getattr(other, name)).any()
        assert not np.array_equal(values[:BLOCK], values[BLOCK : 2 * BLOCK])


def test_deadline_drops_stragglers() -> None:
    def run(deadline: float | None) -> Timing:
        clock = Fleet(np.array([3.0, 1.0, 2.0]), np.ones(3), np.ones(3), deadline)
        return clock.round([1, 2, 0], work(2, 2, 0, 0, [1, 1, 1]))  # 6 / speed: 6, 3 and 2 seconds

    assert run(None) == Timing(6.0, (1, 2, 0), ())
    assert run(6.0) == Timing(6.0, (1, 2, 0), ())
    assert run(10.0) == Timing(6.0, (1, 2, 0), ())
    assert run(3.0) == Timing(3.0, (2, 0), (1,))
    assert run(2.5) == Timing(2.5, (0,), (1, 2))
    assert run(1.0) == Timing(1.0, (), (1, 2, 0))


def test_fleet_from_csv(tmp_path: Path) -> None:
    path = tmp_path / "fleet.csv"
    path.write_text("\ufeff" + HEADER + "1, 2e9, 16, 8\n\n0,1e9,8,4\n", encoding="utf-8")
    clock = fleet({"fleet": str(path), "deadline": 5.0}, devices=2)
    np.testing.assert_array_equal(clock.speed, [1e9, 2e9])
    np.testing.assert_array_equal(clock.down, [1e6, 2e6])
    np.testing.assert_array_equal(clock.up, [5e5, 1e6])
    assert clock.deadline == 5.0


GOOD = "0,1,1,1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected the header"),
        ("device,speed\n", "line 1: expected the header device,macs_per_second,down_mbit,up_mbit"),
        (HEADER + GOOD + "1,1,1\n", "line 3: 3 fields"),
        (HEADER + GOOD + "1,1,1,1,1\n", "line 3: 5 fields"),
        (HEADER + GOOD + "two,1,1,1\n", "line 3: device 'two'"),
        (HEADER + GOOD + "2,1,1,1\n", "line 3: device '2', expected a whole number from 0 to 1"),
        (HEADER + GOOD + "-1,1,1,1\n", "line 3: device '-1'"),
        (HEADER + GOOD + "\n0,1,1,1\n", "line 4: device 0 for the second time"),
        (HEADER + GOOD + "1,fast,1,1\n", "line 3: macs_per_second 'fast'"),
        (HEADER + GOOD + "1,1,0,1\n", "line 3: down_mbit '0'"),
        (HEADER + GOOD + "1,1,1,-4\n", "line 3: up_mbit '-4'"),
        (HEADER + GOOD + "1,1,1,nan\n", "line 3: up_mbit 'nan'"),
        (HEADER + GOOD + "1,1,inf,1\n", "line 3: down_mbit 'inf'"),
        (HEADER + GOOD + "1,1,1,\n", "line 3: up_mbit ''"),
        (HEADER + GOOD, r"no line for device 1 \(1 of 2 missing\)"),
    ],
)
def test_a_wrong_csv_is_one_sentence_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FeddumapError, match=message) as caught:
        fleet({"fleet": str(path)}, devices=2)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_unreadable_csv(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    for name in ("missing.csv", "binary", "."):
        with pytest.raises(FeddumapError, match=r"clock\.fleet = "):
            fleet({"fleet": str(tmp_path / name)})
