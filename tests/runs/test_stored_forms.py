"""Run directories whose JSON is not what it should be are read without a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from feddumap import run as api
from feddumap.errors import FeddumapError
from feddumap.runs.integrity import checkpoints
from feddumap.runs.reader import digest, read_checkpoint, read_records
from feddumap.runs.records import mark_of
from feddumap.runs.stored_forms import checkpoint_problem, record_line, record_problem
from tests.conftest import small
from tests.support.command_line import CommandLine
from tests.support.report_runs import PRUNING


@pytest.fixture(scope="module")
def trained(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        api.train(small(method=PRUNING, train={"rounds": 4}), made)
    return made


@pytest.fixture
def path(trained: Path, tmp_path: Path, home: Path) -> Path:
    import shutil

    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def test_what_runs_write_has_its_form(path: Path) -> None:
    records = read_records(path)
    assert [record_problem(record, number) for number, record in enumerate(records)] == [None] * 4
    assert record_problem(records[2], 1) == "round: 2 instead of 1"
    for file in path.glob("checkpoint-*.json"):
        assert checkpoint_problem(json.loads(file.read_text())) is None
        read_checkpoint(file)


CHANGES: dict[str, Any] = {
    "clock": "soon", "wall": None, "macs": -1, "parameters": [], "bytes_up": 1.5, "accuracy": {},
    "round": "2",
    "lost": {"x": "y"}, "pruning": {"rate": 1}, "device_accuracy": {"mean": "a"}, "validation": 3,
    "dropped": 7, "bytes_down": 2**70, "backdoor": None, "dominant": None,
}  # fmt: skip


@pytest.mark.parametrize("key", ["pruning", "validation", "device_accuracy", "dominant", "backdoor"])
def test_what_is_left_out_is_not_null(key: str) -> None:
    record = {
        **dict.fromkeys(("round", "parameters", "macs", "bytes_down", "bytes_up"), 0),
        **dict.fromkeys(("clock", "wall"), 0.0),
    }
    assert record_problem(record, 0) is None
    assert str(record_problem({**record, key: None}, 0)).startswith(f"{key}: input should be")


@pytest.mark.parametrize("layer", [{}, {"filters": 4, "weights": 9}])
def test_a_pruned_layer_has_filters_or_weights(path: Path, layer: dict[str, int]) -> None:
    record = next(each for each in read_records(path) if "pruning" in each)
    record["pruning"]["layers"] = {"conv1": {"filters": 6, "kept": 3, "rate": 0.5}}
    assert record_problem(record, record["round"]) is None
    record["pruning"]["layers"]["conv1"] = {**layer, "kept": 3, "rate": 0.5}
    problem = str(record_problem(record, record["round"]))
    assert problem.startswith("pruning.layers.conv1: value error, expected either filters or weights")


@pytest.mark.parametrize("key", CHANGES)
def test_records_of_wrong_types(path: Path, run: CommandLine, tmp_path: Path, key: str) -> None:
    """They end the records, as a line does that was cut."""
    lines = (path / "records.jsonl").read_text().splitlines()
    changed = json.dumps({**json.loads(lines[2]), key: CHANGES[key]})
    without = json.dumps({name: value for name, value in json.loads(lines[2]).items() if name != "clock"})
    for line in (changed, without, "[" * 2000, "9" * 5000, '{"round": 2}', "[2]", "null", '{"a": ' * 2000):
        (path / "records.jsonl").write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
        assert len(read_records(path)) == 2
    for command in (("compare", str(path)), ("inspect", "run", str(path))):
        code, _, errors = run(*command)
        assert code == 0, errors


HEADERS: dict[str, Any] = {
    "round": "1", "clock": None, "wall": "x", "devices": {"a": 1}, "architecture": [],
}  # fmt: skip


def test_checkpoints_of_wrong_types(path: Path) -> None:
    file = path / "checkpoint-000004.json"
    value = json.loads(file.read_text())
    value.pop("sha256")
    shape = value["architecture"]
    changes = [{key: wrong} for key, wrong in HEADERS.items()] + [{"devices": []}, {"devices": {"1": "x"}}]
    wrong = [
        {"channels": []},
        {"channels": {"conv1": 10**12}},
        {"channels": {"conv1": "a"}},
        {"classes": 10**9},
        {"input": {"kind": "image", "shape": [3, 2**30, 2**30]}},
        {"input": 3},
    ]
    changes += [{"architecture": {**shape, **each}} for each in wrong]
    changes += [{"memories": []}, {"memories": {"0": 3}}]
    for change in changes:
        made = {**value, **change}
        file.write_text(json.dumps({**made, "sha256": digest(made)}))
        with pytest.raises(FeddumapError, match=r"checkpoint-000004\.json is damaged"):
            read_checkpoint(file)
    for text in ("[]", "[1, 2]", "3", "null", "[" * 2000, "9" * 5000, '"sha256"'):
        file.write_text(text)
        with pytest.raises(FeddumapError, match=r"checkpoint-000004\.json is damaged"):
            read_checkpoint(file)


def test_records_that_a_checkpoint_was_made_with_are_never_cut(path: Path, run: CommandLine) -> None:
    """A line of another version, say, under a mark that calls it whole."""
    file = path / "records.jsonl"
    lines = file.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "clipped": 0.25})
    file.write_text("\n".join(lines) + "\n")
    for checkpoint in path.glob("checkpoint-*.json"):
        value = json.loads(checkpoint.read_text())
        ends = b"".join(file.read_bytes().splitlines(keepends=True)[: value["round"]])
        made = {
            **{key: each for key, each in value.items() if key != "sha256"},
            "records": mark_of(ends).to_json(),
        }
        checkpoint.write_text(json.dumps({**made, "sha256": digest(made)}))
    before = file.read_bytes()
    code, said, errors = run("verify", str(path))
    assert code != 0
    assert "records.jsonl" in said + errors
    assert "nothing was changed" in said + errors
    code, _, errors = run("resume", str(path), "--rounds", "5")
    assert code != 0
    assert "line 2 is not a record that this version reads" in " ".join(errors.split())
    assert file.read_bytes() == before


def test_a_time_without_end_cannot_be_recorded() -> None:
    with pytest.raises(FeddumapError, match=r"^round 3 cannot be recorded .*is a time of \[clock\]"):
        record_line({"round": 3, "clock": float("inf")})


def test_checkpoints_are_ordered_by_round(tmp_path: Path) -> None:
    for number in (2, 999_999, 1_000_000):
        (tmp_path / f"checkpoint-{number:06d}.json").touch()
    assert [file.stem[11:] for file in checkpoints(tmp_path)] == ["1000000", "999999", "000002"]


def test_resuming_goes_back(path: Path, run: CommandLine) -> None:
    (path / "checkpoint-000004.json").write_text("[1]")
    code, _, errors = run("resume", str(path))
    assert code == 0
    assert "checkpoint-000004.json is damaged" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("text", ["[" * 2000, "a = " + "9" * 5000, "[train]\nstack = " + "[" * 1000, "\x00"])
def test_a_configuration_that_is_none(path: Path, run: CommandLine, text: str) -> None:
    (path / "config.toml").write_text(text)
    (path / "summary.json").write_text("[" * 2000)
    for command in (("compare", str(path)), ("inspect", "run", str(path)), ("resume", str(path))):
        code, _, errors = run(*command)
        assert code == 2
        assert "config.toml" in errors
        assert "Traceback" not in errors
