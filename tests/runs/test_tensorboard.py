"""`run.tensorboard`: the events that TensorBoard itself reads are the records."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as WatchingAccumulator,
)

from feddumap import run as api
from feddumap.cli import main as cli
from feddumap.errors import FeddumapError
from feddumap.runs.reader import read_config, read_records
from feddumap.runs.trackers.tensorboard import Events
from feddumap.sweep import grid
from tests.conftest import small

ON: dict[str, Any] = {"tensorboard": True}
METHOD = {"name": "feddumap", "prune_round": 2, "rate": "fixed", "fixed_rate": 0.5}


def read(run: Path) -> dict[str, dict[int, float]]:
    """Every scalar by tag and step, as TensorBoard reads them; a step that is there twice is an error."""
    reader = EventAccumulator(
        str(run / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=False
    )
    reader.Reload()
    found: dict[str, dict[int, float]] = {}
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        assert [event.step for event in events] == sorted({event.step for event in events})
        assert all(before.wall_time <= after.wall_time for before, after in pairwise(events))
        found[tag] = {event.step: event.value for event in events}
    return found


def expected(records: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """The same from the records: what is a number there, in float32."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            if type(value) in (int, float) and name != "round":
                found.setdefault(name, {})[record["round"]] = float(np.float32(value))
    return found


def test_every_number_of_every_record(home: Path, tmp_path: Path) -> None:
    config = small(method=METHOD, train={"rounds": 5}, run=ON | {"evaluate_every": 2})
    api.train(config, tmp_path / "run")
    records = read_records(tmp_path / "run")
    found = read(tmp_path / "run")
    assert found == expected(records)
    wanted = (
        "accuracy loss lr clock bytes_down bytes_up parameters macs samples alpha tau_eff server_accuracy"
    )
    assert set(wanted.split()) <= set(found)
    assert set(found["lr"]) == set(range(5))
    assert (
        set(found["accuracy"]) == {r["round"] for r in records if r["accuracy"] is not None} != set(range(5))
    )
    assert found["parameters"][4] < found["parameters"][0]


def test_results_are_the_same_with_and_without(home: Path, tmp_path: Path) -> None:
    api.train(small(), tmp_path / "plain")
    api.train(small(run=ON), tmp_path / "watched")
    assert not (tmp_path / "plain" / "tensorboard").exists()
    for one, other in zip(*(read_records(tmp_path / name) for name in ("plain", "watched")), strict=True):
        assert {**one, "wall": 0} == {**other, "wall": 0}
    tensors = "checkpoint-000003.safetensors"
    assert (tmp_path / "plain" / tensors).read_bytes() == (tmp_path / "watched" / tensors).read_bytes()


def interrupted(path: Path, rounds: int, **run: Any) -> None:
    started = api.start(small(train={"rounds": 6}, run=ON | {"checkpoint_every": 1} | run), path)
    steps = iter(started)
    for _ in range(rounds):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    started.close()


def test_a_resume_from_an_older_checkpoint(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    interrupted(path, 4)
    assert set(read(path)["lr"]) == {0, 1, 2, 3}
    watcher = WatchingAccumulator(str(path / "tensorboard"), size_guidance={"tensors": 0})
    watcher.Reload()
    (path / "checkpoint-000004.json").unlink()  # the newest is lost: round 3 is done again
    with (path / "records.jsonl").open("a") as file:
        file.write('{"round": 4, "acc')
    resumed = api.resume(path)
    assert resumed.state.round == 3
    steps = iter(resumed)
    next(steps)
    assert set(read(path)["lr"]) == {0, 1, 2, 3}  # seen at once
    steps.close()  # type: ignore[attr-defined]
    resumed.close()
    api.resume(path).run().close()
    assert read(path) == expected(read_records(path))
    assert set(read(path)["lr"]) == set(range(6))
    sizes = [file.stat().st_size for file in sorted((path / "tensorboard").iterdir())]
    assert [size > 0 for size in sizes] == [False, False, True]
    watcher.Reload()  # as does a TensorBoard that was watching all the while
    assert [event.step for event in watcher.Tensors("lr")] == list(range(6))


def test_it_can_be_turned_on_later_and_off(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    interrupted(path, 2, tensorboard=False)
    assert not (path / "tensorboard").exists()
    run = api.resume(path, tensorboard=True)
    next(iter(run))
    run.close()
    assert read_config(path).run.tensorboard
    assert set(read(path)["lr"]) == {0, 1, 2}
    api.resume(path, tensorboard=False).run().close()
    assert set(read(path)["lr"]) == {0, 1, 2}
    api.resume(path, tensorboard=True).run().close()  # a finished run too
    assert read(path) == expected(read_records(path))
    assert set(read(path)["lr"]) == set(range(6))


def test_a_torn_file_is_made_anew_and_others_are_left_alone(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    interrupted(path, 3)
    (file,) = (path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    (path / "tensorboard" / "notes.txt").write_text("mine")
    api.resume(path).run().close()
    assert read(path) == expected(read_records(path))
    assert (path / "tensorboard" / "notes.txt").read_text() == "mine"
    assert not file.stat().st_size


def test_equal_records_make_equal_files(tmp_path: Path) -> None:
    records = [{"round": 0, "wall": 1.5, "loss": 2.0}, {"round": 1, "wall": 2.5, "loss": 1.0}]
    Events(tmp_path / "whole", records, 1e9).close()
    parts = Events(tmp_path / "parts", records[:1], 1e9)
    parts.add(records[1])
    parts.close()
    contents = [next((tmp_path / name).iterdir()).read_bytes() for name in ("whole", "parts")]
    assert contents[0] == contents[1]


def test_without_the_package_nothing_begins(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(tmp_path / "old", 1)
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(FeddumapError, match=r"needs the package tensorboard.*pip install tensorboard"):
        api.start(small(run=ON), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(FeddumapError, match="needs the package tensorboard"):
        api.resume(tmp_path / "old")
    monkeypatch.setattr(sys, "argv", ["feddumap", "resume", str(tmp_path / "old"), "--no-tensorboard"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert len(read_records(tmp_path / "old")) == 6


def test_it_needs_a_run_directory(home: Path) -> None:
    with pytest.raises(FeddumapError, match="needs a run directory"):
        api.train(small(run=ON))


def test_it_does_not_make_another_run(home: Path, tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 1)
    other = small(train={"rounds": 6}, run={"workers": 2})
    with pytest.raises(FeddumapError, match="holds this run already"):
        api.start(other, tmp_path / "run")
    with pytest.raises(FeddumapError, match=r"another configuration \(train.rounds is 6 there, 3 here\)"):
        api.start(small(), tmp_path / "run")

    file = tmp_path / "grid.toml"
    tables = small(train={"rounds": 1}).to_toml()
    text = "".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for section, keys in tables.items()
    )
    file.write_text(text + '[grid]\n"run.seed" = [1, 2]\n')
    first, second = grid.cells(file, tmp_path / "grid")
    api.train(first.config, first.path)
    again = grid.cells(file, tmp_path / "grid", ["run.tensorboard=true"])
    assert [cell.path for cell in again] == [first.path, second.path]
    assert all(cell.config.run.tensorboard for cell in again)
    file.write_text(text + '[grid]\n"run.tensorboard" = [true, false]\n')
    with pytest.raises(FeddumapError, match=r"grid key run\.tensorboard changes no result"):
        grid.cells(file, tmp_path / "grid")
