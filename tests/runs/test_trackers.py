"""`run.wandb` and `run.mlflow`: what they wrote, read back, is the records, each round once."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feddumap import run as api
from feddumap.errors import FeddumapError
from feddumap.runs.reader import read_records
from tests.conftest import small
from tests.support.runs import interrupted

Numbers = dict[str, dict[int, float]]
BLOCK, WHOLE, LAST = 32768, 1, 4


def expected(run: Path) -> Numbers:
    """The numbers of the records, by name and round."""
    found: Numbers = {}
    for record in read_records(run):
        for name, value in record.items():
            if type(value) in (int, float) and name not in ("round", "wall"):
                found.setdefault(name, {})[record["round"]] = float(value)
    return found


def messages_of(file: Path) -> Iterator[bytes]:
    """The messages in a file of Weights & Biases: LevelDB's log format after a header of 7 bytes."""
    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # no piece begins so near a block's end
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def read_wandb(run: Path) -> Numbers:
    """The history in the only offline file; a step that is there twice is an error."""
    from wandb.proto import wandb_internal_pb2 as messages

    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    found: Numbers = {}
    for data in messages_of(file):
        message = messages.Record()
        message.ParseFromString(data)
        if message.WhichOneof("record_type") != "history":
            continue
        row = {item.key or ".".join(item.nested_key): float(item.value_json) for item in message.history.item}
        for name, value in row.items():
            if not name.startswith("_") and name != "wall":
                assert int(row["_step"]) not in found.setdefault(name, {})
                found[name][int(row["_step"])] = value
    return found


def read_mlflow(run: Path) -> Numbers:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("feddumap")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params["train.lr"] == "0.05"
    assert found.info.status == "FINISHED"
    read: Numbers = {}
    for name in found.data.metrics:
        history = client.get_metric_history(found.info.run_id, name)
        steps = [each.step for each in history]
        assert len(steps) == len(set(steps))
        if name != "wall":
            read[name] = {each.step: each.value for each in history}
    return read


READERS = {"wandb": read_wandb, "mlflow": read_mlflow}


def written(name: str, run: Path) -> Numbers:
    """What a tracker has written. W&B's own process may write the last of it after a run has ended."""
    until = time.monotonic() + 20
    while (found := READERS[name](run)) != expected(run) and time.monotonic() < until:
        time.sleep(0.1)
    return found


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.mark.extras
@pytest.mark.parametrize("name", READERS)
def test_every_round_once_however_often_it_is_resumed(
    home: Path, tmp_path: Path, offline: None, name: str
) -> None:
    pytest.importorskip(name, reason=f"the package {name} is not installed: pip install 'feddumap[{name}]'")
    path = tmp_path / "run"
    config = small(method={"name": "feddu"}, train={"rounds": 5}, run={name: True, "evaluate_every": 2})
    interrupted(config, path, 4)
    (path / "checkpoint-000004.json").unlink()  # the newest is lost: round 3 is done again
    again = api.resume(path)
    assert again.state.round == 3
    again.run().close()
    assert written(name, path) == expected(path)
    assert set(expected(path)["lr"]) == set(range(5))
    api.resume(path, rounds=6).run().close()
    assert written(name, path) == expected(path)
    assert {"alpha", "tau_eff", "accuracy"} <= set(expected(path))


@pytest.mark.extras
@pytest.mark.parametrize("name", READERS)
def test_it_can_be_turned_on_later_and_changes_no_result(
    home: Path, tmp_path: Path, offline: None, name: str
) -> None:
    pytest.importorskip(name, reason=f"the package {name} is not installed: pip install 'feddumap[{name}]'")
    interrupted(small(), tmp_path / "run", 2)
    assert not (tmp_path / "run" / name).exists()
    api.resume(tmp_path / "run", runtime={name: True}).run().close()
    assert written(name, tmp_path / "run") == expected(tmp_path / "run")
    api.train(small(), tmp_path / "plain")
    assert expected(tmp_path / "run") == expected(tmp_path / "plain")


@pytest.mark.parametrize("name", READERS)
def test_without_the_package_nothing_begins(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FeddumapError, match=rf"run.{name} = true needs the package.*feddumap\[{name}\]"):
        api.start(small(run={name: True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", READERS)
def test_it_needs_a_run_directory(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake: Any = type(sys)(name)
    monkeypatch.setitem(sys.modules, name, fake)
    with pytest.raises(FeddumapError, match=f"run.{name} = true needs a run directory"):
        api.train(small(run={name: True}))
