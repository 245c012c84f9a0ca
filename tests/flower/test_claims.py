"""What a device claims to hold is bounded: by its part of the split, or by run.most_samples."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.flower import DEVICES, config_of

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from feddumap import run as api
from feddumap.config import Config
from feddumap.engine.rounds import take_census
from feddumap.flower import server
from tests.support.flower_grid import FakeGrid, Mischief


def telling(**values: Any) -> Mischief:
    """Other numbers in the answer to the census."""

    def change(message: Message, content: RecordDict) -> RecordDict:
        if message.content.get("question", ConfigRecord()).get("name") == "census":
            content["values"] = MetricRecord({**dict(content["values"]), **values})  # type: ignore[arg-type]
        return content

    return change


def missing(config: Config, grid: FakeGrid, labels: Any = "none") -> dict[int, str]:
    run = api.start(config)
    return dict(take_census(server.cohort(grid, run), run.state, run.config, labels).missing)


@pytest.mark.parametrize("samples", [10**12, 10**6, 1])
def test_a_part_of_the_split_has_its_size(home: Path, tmp_path: Path, samples: int) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    grid.node(2).mischief = telling(samples=samples)
    config = config_of("fedavg")
    size = len(api.start(config).split.device(2))
    sentence = f"it tells {samples} samples, but its part of the data set has {size}"
    assert missing(config, grid) == {2: sentence}


@pytest.mark.parametrize("labels", ["counts", "gradient"])
def test_and_its_labels(home: Path, tmp_path: Path, labels: str) -> None:
    """Both as counts and as a gradient: what the devices tell is accepted, a permutation of it is not."""
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    config = config_of("feddu")
    assert missing(config, grid, labels) == {}

    def turned(message: Message, content: RecordDict) -> RecordDict:
        numbers = list(content["values"][labels])  # type: ignore[call-overload, arg-type]
        return telling(**{labels: numbers[1:] + numbers[:1]})(message, content)  # type: ignore[return-value]

    def change(message: Message, content: RecordDict) -> RecordDict:
        return turned(message, content) if "values" in content else content

    grid.node(1).mischief = change
    assert missing(config, grid, labels) == {
        1: "it tells other label counts than its part of the data set has"
    }


def test_a_gradient_adds_up_to_zero(home: Path, tmp_path: Path) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    grid.node(0).mischief = telling(gradient=[0.05] * 10)
    sentence = "it tells a gradient whose parts do not add up to 0"
    assert missing(config_of("feddu"), grid, "gradient") == {0: sentence}


def test_data_of_its_own_is_bounded_by_the_configuration(home: Path, tmp_path: Path) -> None:
    """100,000 unless run.most_samples says otherwise; the device is refused and the others train."""
    config = config_of("fedavg")
    run = api.start(config)
    indices = run.split.device(3)
    np.savez(
        tmp_path / "own.npz",
        images=run.dataset.train_inputs[indices],
        labels=run.dataset.train_labels[indices],
    )
    grid = FakeGrid.of(DEVICES, state=str(tmp_path / "state"))
    grid.node(3).config["data"] = str(tmp_path / "own.npz")
    assert missing(config, grid) == {}
    few = len(indices) - 1
    reason = f"it tells {few + 1} samples of its own, more than run.most_samples = {few}"
    tight = config.replace(run={"most_samples": few})
    assert missing(tight, grid) == {3: reason}
    grid.node(3).mischief = telling(samples=10**12)
    reason = f"it tells {10**12} samples of its own, more than run.most_samples = 100000"
    assert missing(config, grid) == {3: reason}
    trained = api.start(config)
    trained.engine = partial(server.cohort, grid)
    for record in trained.run().records:
        assert 3 not in record["devices"]
        assert record.get("lost", {}) in ({}, {"3": reason})


def test_a_device_that_decides_a_round_is_in_the_record(home: Path, tmp_path: Path) -> None:
    """As many samples as it may claim, and more than all others together."""
    config = config_of("fedavg", train={"rounds": 1, "cohort": DEVICES}, run={"most_samples": 5000})
    run = api.start(config)
    indices = run.split.device(3)
    images, labels = run.dataset.train_inputs[indices], run.dataset.train_labels[indices]
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    grid = FakeGrid.of(DEVICES, state=str(tmp_path / "state"))
    grid.node(3).config["data"] = str(tmp_path / "own.npz")

    def claim(message: Message, content: RecordDict) -> RecordDict:
        content = telling(samples=5000)(message, content)  # type: ignore[assignment]
        if "upload" in content:
            content["upload"] = ConfigRecord({**dict(content["upload"]), "samples": 5000})  # type: ignore[arg-type]
        return content

    grid.node(3).mischief = claim
    run.engine = partial(server.cohort, grid)
    (record,) = run.run().records
    others = sum(len(run.split.device(k)) for k in range(3))
    assert record["dominant"] == {"device": 3, "share": pytest.approx(5000 / (5000 + others))}
