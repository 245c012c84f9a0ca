"""`data.validation`: server images that nobody trains on, and the round that they would choose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.tensors import digest
from feddumap.data import partition
from feddumap.data.dataset import Dataset
from feddumap.errors import FeddumapError
from feddumap.models import architecture, initialise, network
from feddumap.runs.summary import accuracies, smooth
from feddumap.training.backends import make_model
from feddumap.training.evaluation import score_within
from feddumap.training.samples import Samples, to_input
from tests.conftest import small


def chosen(data: Dataset, **keys: int) -> tuple[partition.Split, np.ndarray]:
    config = partition.resolve(small(data={"validation": 20, "server_fraction": 0.05, **keys}).data, 10)
    labels = data.train_labels
    made = partition.split(labels, 10, config, 5)
    return made, partition.validation(labels, 10, config, made, 5)


def test_images_that_nobody_trains_on(digits: Dataset) -> None:
    made, held = chosen(digits)
    assert len(held) == 20
    assert not np.intersect1d(held, made.server).size
    assert not np.intersect1d(held, made.indices).size
    server = set(digits.train_labels[made.server].tolist())
    labels, counts = np.unique(digits.train_labels[held], return_counts=True)
    assert set(labels.tolist()) == server
    assert set(counts.tolist()) == {20 // len(server)}
    assert np.array_equal(held, chosen(digits)[1])
    assert np.array_equal(made.server, chosen(digits, validation=0)[0].server)
    assert chosen(digits, validation=0)[1].size == 0


def test_too_many_or_no_server_are_refused_before_training(home: object, tmp_path: Path) -> None:
    with pytest.raises(FeddumapError, match=r"data.validation = 5000: expected at most \d+, as class \d"):
        api.start(small(data={"validation": 5000}), tmp_path / "run")
    with pytest.raises(FeddumapError, match=r"data.validation = 10: .*the server has no images"):
        api.start(small(data={"validation": 10, "server_fraction": 0.0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_every_evaluation_is_recorded_and_changes_nothing(home: object, workers: int) -> None:
    run = api.train(small(data={"validation": 20, "server_fraction": 0.05}, run={"workers": workers}))
    plain = api.train(small(data={"server_fraction": 0.05}))
    assert digest(run.state.weights) == digest(plain.state.weights)
    assert "validation" not in plain.records[0]
    data = run.dataset
    held = partition.validation(data.train_labels, 10, run.config.data, run.split, run.config.run.seed)
    net = network(run.state.architecture, run.state.weights).double().eval()
    outputs = net(to_input(torch.from_numpy(data.train_inputs[held])).double())
    labels = torch.from_numpy(data.train_labels[held].astype(np.int64))
    found = run.records[-1]["validation"]
    assert found["loss"] == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-4)
    assert found["accuracy"] == (outputs.argmax(1) == labels).double().mean().item()


def test_it_chooses_a_round() -> None:
    rng = np.random.default_rng(0)
    test, held = rng.random(60), rng.random(60)
    records = [
        {"round": i, "accuracy": a, "validation": {"accuracy": v}}
        for i, (a, v) in enumerate(zip(test.tolist(), held.tolist(), strict=True))
    ]
    assert accuracies(records)["validated"] == test[int(smooth(held.tolist()).argmax())]
    without = [{"round": 0, "accuracy": 0.5}]
    assert accuracies(without)["validated"] is None


def test_scores_within_classes_leave_the_other_outputs_out(home: object) -> None:
    """Against plain arithmetic on the outputs; a bias towards an absent class changes nothing."""
    shape = architecture("lenet", 10)
    weights = initialise(shape, 3)
    generator = torch.Generator().manual_seed(1)
    targets = torch.tensor([2, 5, 7])[torch.randint(0, 3, (40,), generator=generator)]
    inputs = torch.randint(0, 256, (40, 32, 32, 3), dtype=torch.uint8, generator=generator)
    config = Config.parse({"train": {"kernels": "torch"}})
    found = score_within(shape, weights, Samples(inputs, targets), config)
    outputs = make_model(shape, weights, "torch").outputs(inputs).double().numpy()[:, [2, 5, 7]]
    places = np.searchsorted([2, 5, 7], targets.numpy())
    assert found.correct == int((outputs.argmax(axis=1) == places).sum())
    logs = np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(40), places]
    assert found.loss == pytest.approx(logs.sum(), rel=1e-6)
    weights["fc3.bias"] = weights["fc3.bias"].clone()
    weights["fc3.bias"][4] += 100
    assert score_within(shape, weights, Samples(inputs, targets), config) == found
