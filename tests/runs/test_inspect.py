"""`feddumap inspect run`: what a run directory tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from feddumap import run as api
from feddumap.errors import FeddumapError
from feddumap.models.cost import macs
from feddumap.runs.inspect import describe, show
from feddumap.runs.reader import read_records
from tests.conftest import small


@pytest.fixture
def run_path(home: Path, tmp_path: Path) -> Path:
    method = {"name": "feddumap", "prune_round": 2, "rate": "fixed", "fixed_rate": 0.6}
    api.train(small(method=method, train={"rounds": 4}), tmp_path / "run")
    return tmp_path / "run"


def test_the_story_tells_what_was_removed_and_saved(run_path: Path) -> None:
    value = json.loads(json.dumps(describe(run_path)))
    records = read_records(run_path)
    assert (value["rounds"], value["of"], value["finished"]) == (4, 4, True)
    (pruning,) = value["prunings"]
    assert pruning["round"] == 2
    for layer in pruning["layers"].values():
        assert layer["kept"] == layer["filters"] - len(layer["removed"]) >= 1
    assert pruning["macs"]["before"] == records[1]["macs"] == 44_040
    assert pruning["macs"]["after"] == records[2]["macs"] == value["macs"] < 44_040
    seconds = pruning["round_seconds"]
    assert seconds["before"] == pytest.approx(records[1]["clock"] - records[0]["clock"])
    assert seconds["after"] == pytest.approx(records[2]["clock"] - records[1]["clock"])
    assert seconds["after"] < seconds["before"]
    assert value["bytes_down"] == sum(record["bytes_down"] for record in records)
    assert [point["round"] for point in value["curve"]] == [0, 1, 2, 3]
    assert value["curve"][0]["alpha"] == records[0]["alpha"]


def test_the_story_is_shown(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(describe(run_path))
    printed = capsys.readouterr().out
    assert "Pruned after 2 rounds at the global rate 0.600" in printed
    for word in ("conv1", "conv2", "multiply-adds", "virtual seconds per round", "tau eff"):
        assert word in printed
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    accuracies = [f"{100 * record['accuracy']:.1f} %" for record in read_records(run_path)]
    assert [row[1] for row in rows if row[0] in "0123" and row[1].endswith("%")] == accuracies
    assert "Accuracy by round\n" in "\n".join(line.rstrip() for line in printed.splitlines())


def test_rounds_without_a_server_update_are_counted(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_path / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record, what in zip(records, ("negligible", "exploded", "negligible"), strict=False):
        record["skipped"] = what
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    show(describe(run_path))
    printed = capsys.readouterr().out
    assert f"in 2 of {len(records)} rounds: α was at most 0.001" in printed
    assert f"in 1 of {len(records)} rounds: the server's loss exploded" in printed


def test_lost_devices_are_named(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = read_records(run_path)
    records[1]["lost"] = {"4": "it did not answer within 8 s"}
    records[3]["lost"] = {str(device): f"reason {device}" for device in range(12)}
    (run_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    value = describe(run_path)
    assert value["lost"][0] == {"round": 1, "device": 4, "reason": "it did not answer within 8 s"}
    assert len(value["lost"]) == 13
    show(value)
    printed = capsys.readouterr().out
    assert "Missing devices: the last 10 of 13 times" in printed
    assert "reason 11" in printed
    assert "within 8 s" not in printed


def test_a_device_that_decided_rounds_is_named(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(run_path)["dominant"] == []
    records = read_records(run_path)
    records[2]["dominant"] = {"device": 5, "share": 0.98}
    (run_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    show(describe(run_path))
    printed = capsys.readouterr().out
    assert "over half of the weight" in printed
    assert "in 1 round, last of device 5 (98.0 %)" in printed


def test_a_run_still_going_and_one_not_begun(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = api.start(small(train={"rounds": 40}), tmp_path / "run")
    with pytest.raises(FeddumapError, match="has no finished round yet"):
        describe(tmp_path / "run")
    rounds = iter(run)
    for _ in range(12):
        next(rounds)
    value = describe(tmp_path / "run")
    rounds.close()  # type: ignore[attr-defined]
    run.close()
    assert (value["rounds"], value["finished"], value["prunings"]) == (12, False, [])
    assert value["macs"] == macs(run.state.architecture)
    assert len(value["curve"]) == 10
    assert (value["curve"][0]["round"], value["curve"][-1]["round"]) == (0, 11)
    show(value)
    assert "Accuracy by round: 10 of 12 rounds" in capsys.readouterr().out
    with pytest.raises(FeddumapError, match="is not a run directory"):
        describe(tmp_path)
