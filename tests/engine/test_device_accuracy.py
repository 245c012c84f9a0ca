"""Accuracy on devices' own test data: against the network itself, with any number of workers, and where it is
shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feddumap import run as api
from feddumap.config import Config
from feddumap.data.in_memory import InMemoryDataset
from feddumap.errors import FeddumapError
from feddumap.progress import print_summary
from feddumap.report.page.document import html
from feddumap.report.page.sections import content
from feddumap.report.series import find_runs
from feddumap.runs.inspect import describe, show
from feddumap.system import console
from tests.support.report_runs import page_data

USERS = np.arange(600) % 23
TEST_USERS = np.random.default_rng(1).integers(-1, 25, 700)  # some nobody's, some of users who do not train


@pytest.fixture(scope="module")
def data() -> InMemoryDataset:
    rng = np.random.default_rng(0)

    def draw(count: int) -> tuple[Any, Any]:
        labels = np.arange(count) % 3
        return rng.normal(size=(count, 4)) + labels[:, None], labels

    return InMemoryDataset(train=draw(600), test=draw(700), users=USERS, test_users=TEST_USERS)


def config_of(data: InMemoryDataset, **keys: Any) -> Config:
    return Config.parse(
        {
            "data": {"name": data.config_name, "partition": "natural", **keys},
            "model": {"name": "mlp"},
            "train": {"rounds": 3, "cohort": 4, "epochs": 1, "batch": 8},
            "clock": {"profile": "general"},
            "run": {"evaluate_every": 2, "workers": 1},
        }
    )


def oracle(run: api.Run, users: list[int]) -> dict[str, float]:
    inputs = torch.from_numpy(np.array(run.dataset.test_inputs))
    right = run.model()(inputs).argmax(1).numpy() == run.dataset.test_labels
    each = sorted(float(right[user == TEST_USERS].mean()) for user in users if (user == TEST_USERS).any())
    worst = each[: max(1, len(each) // 10)]
    return {
        "mean": float(np.mean(each)),
        "worst_tenth": float(np.mean(worst)),
        "spread": float(np.std(each)),
        "devices": len(each),
    }


def test_equals_the_network_itself_whatever_the_number_of_workers(data: InMemoryDataset) -> None:
    run = api.train(config_of(data))
    assert run.records[-1]["device_accuracy"] == pytest.approx(oracle(run, list(range(23))), abs=1e-12)
    assert "device_accuracy" not in run.records[0], "as round 0 was not evaluated"
    spread = api.train(config_of(data).replace(run={"workers": 3}))
    assert spread.records[-1]["device_accuracy"] == run.records[-1]["device_accuracy"]


def test_only_users_who_are_devices_count(data: InMemoryDataset) -> None:
    run = api.train(config_of(data, devices=5, server_fraction=0.0))
    assert run.dataset.train_users is not None
    users = [int(run.dataset.users[run.dataset.train_users[run.split.device(k)[0]]]) for k in range(5)]
    assert run.records[-1]["device_accuracy"] == pytest.approx(oracle(run, users), abs=1e-12)
    assert run.records[-1]["device_accuracy"]["devices"] == 5
    plain = api.train(config_of(data, partition="iid", devices=5))
    assert "device_accuracy" not in plain.records[-1]
    assert "device_accuracy" not in plain.summary


def test_a_cohort_larger_than_the_number_of_users_is_refused(data: InMemoryDataset) -> None:
    with pytest.raises(FeddumapError, match=r"train.cohort = 24 is larger than data.devices = 23"):
        api.start(config_of(data).replace(train={"cohort": 24}))
    assert api.start(config_of(data).replace(train={"cohort": 23})).config.data.devices == 23


def test_shown(data: InMemoryDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = api.train(config_of(data), tmp_path / "run")
    found = run.records[-1]["device_accuracy"]
    assert run.summary["device_accuracy"] == found
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["device_accuracy"] == found
    value = describe(tmp_path / "run")
    assert value["device_accuracy"] == found
    assert value["curve"][-1]["devices_worst_tenth"] == found["worst_tenth"]
    for table in (lambda: show(value), lambda: print_summary(run.summary)):
        table()
        printed = " ".join(capsys.readouterr().out.split())
        assert f"mean {console.percent(found['mean'])}, worst tenth" in printed
    page = html(content("devices", find_runs([tmp_path / "run"])), figures=False)
    shown = page_data(page)
    columns = shown["lines"][0]["accuracy"]["mean"]
    assert columns["device_mean"][-1] == pytest.approx(found["mean"], rel=1e-5)
    assert columns["device_worst"][-1] == pytest.approx(found["worst_tenth"], rel=1e-5)
    axes = next(chart for chart in shown["charts"] if chart["name"] == "accuracy")["y"]
    assert [axis["key"] for axis in axes] == ["smooth", "raw", "device_mean", "device_worst"]
