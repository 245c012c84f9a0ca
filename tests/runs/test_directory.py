"""Run directories: what is in them, and that an interrupted run ends as if nothing had happened."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError
from feddumap.runs.directory import RunDirectory
from feddumap.runs.reader import read_checkpoint, read_records
from feddumap.runs.summary import accuracies, reached, smooth
from feddumap.system import atomic_files
from tests.conftest import small
from tests.support.runs import interrupted, wait_for_records


def finished(directory: Path) -> tuple[str, float, list[dict[str, Any]]]:
    """Everything about a run that must not depend on how it got there."""
    saved = read_checkpoint(max(directory.glob("checkpoint-*.json")))
    records = [{**record, "wall": 0} for record in read_records(directory)]
    return digest(saved.state.weights), saved.state.clock, records


@pytest.fixture
def whole(home: Path, tmp_path: Path) -> tuple[Path, Config]:
    """A run of five rounds, never interrupted."""
    config = small(train={"rounds": 5})
    api.train(config, tmp_path / "whole")
    return tmp_path / "whole", config


def test_what_a_run_directory_holds(whole: tuple[Path, Config]) -> None:
    directory, _ = whole
    names = {path.name for path in directory.iterdir()}
    assert names == {
        ".lock", "config.toml", "split.safetensors", "records.jsonl", "summary.json",
        "checkpoint-000004.json", "checkpoint-000004.safetensors",
        "checkpoint-000005.json", "checkpoint-000005.safetensors",
    }  # fmt: skip
    summary = json.loads((directory / "summary.json").read_text())
    assert list(summary) == [
        "method", "model", "dataset", "rounds", "configured_rounds", "accuracy", "targets", "parameters",
        "macs",
        "bytes_down", "bytes_up", "clock", "wall",
    ]  # fmt: skip
    assert (summary["method"], summary["model"], summary["dataset"]) == ("fedavg", "lenet", "digits")
    assert set(summary["accuracy"]) == {"final", "mean10", "best", "best_smoothed", "validated"}
    records = [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == [0, 1, 2, 3, 4]
    needed = [
        "round",
        "accuracy",
        "loss",
        "lr",
        "devices",
        "samples",
        "parameters",
        "macs",
        "bytes_down",
        "bytes_up",
        "clock",
        "wall",
    ]
    assert set(needed) <= set(records[0])
    assert summary["accuracy"]["final"] == records[-1]["accuracy"]
    resolved = RunDirectory.open(directory).config()
    assert (resolved.data.shards_per_device, resolved.data.server_classes) == (2, 5)


@pytest.mark.parametrize("workers", [1, 2])
def test_resume_gives_the_same_bits(whole: tuple[Path, Config], tmp_path: Path, workers: int) -> None:
    directory, config = whole
    interrupted(config, tmp_path / "part", 2)
    run = api.resume(tmp_path / "part", workers=workers)
    assert run.state.round == 2
    run.run().close()
    assert finished(tmp_path / "part") == finished(directory)
    assert (tmp_path / "part" / "summary.json").exists()


def test_a_sparse_checkpoint_is_made_up_for(whole: tuple[Path, Config], tmp_path: Path) -> None:
    """Rounds after the last checkpoint are computed again; leaving the loop politely saves at once."""
    config = whole[1].replace(run={"checkpoint_every": 3})
    run = api.start(config, tmp_path / "part")
    iterator = iter(run)
    for _ in range(4):
        next(iterator)
    assert len(read_records(tmp_path / "part")) == 4
    assert [path.name for path in tmp_path.glob("part/checkpoint-*.json")] == ["checkpoint-000003.json"]
    iterator.close()  # type: ignore[attr-defined]
    run.close()
    assert (tmp_path / "part" / "checkpoint-000004.json").exists()
    (tmp_path / "part" / "checkpoint-000004.json").unlink()
    api.resume(tmp_path / "part").run().close()
    assert finished(tmp_path / "part")[0] == finished(whole[0])[0]
    assert finished(tmp_path / "part")[2] == finished(whole[0])[2]


@pytest.mark.parametrize(
    "tail", ['{"round": 2, "acc', '{"round": 2}', "\x00\x00\x00", '{"round": 7}\n', "\n"]
)
def test_a_half_written_record_is_dropped(whole: tuple[Path, Config], tmp_path: Path, tail: str) -> None:
    directory, config = whole
    interrupted(config, tmp_path / "part", 2)
    with (tmp_path / "part" / "records.jsonl").open("a") as file:
        file.write(tail)
    api.resume(tmp_path / "part").run().close()
    assert finished(tmp_path / "part") == finished(directory)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_used(
    whole: tuple[Path, Config], tmp_path: Path, damage: Any, suffix: str
) -> None:
    directory, config = whole
    interrupted(config, tmp_path / "part", 3)
    damage(tmp_path / "part" / f"checkpoint-000003.{suffix}")
    said: list[str] = []
    run = api.resume(tmp_path / "part", say=said.append)
    assert run.state.round == 2
    missing = damage is Path.unlink and suffix == "json"  # then there is nothing to complain about
    assert missing or any(
        "checkpoint-000003.json is damaged" in line and "resuming from round 2" in line for line in said
    )
    run.run().close()
    assert finished(tmp_path / "part") == finished(directory)


def test_when_all_checkpoints_are_damaged_it_starts_again_and_says_so(
    whole: tuple[Path, Config], tmp_path: Path
) -> None:
    directory, config = whole
    interrupted(config, tmp_path / "part", 3)
    for path in (tmp_path / "part").glob("checkpoint-*.safetensors"):
        flip(path)
    said: list[str] = []
    api.resume(tmp_path / "part", say=said.append).run().close()
    assert any("resuming from round 0" in line for line in said)
    assert finished(tmp_path / "part") == finished(directory)


@pytest.mark.parametrize(("left", "start"), [(0, 0), (1, 0), (2, 2)])
def test_records_that_fall_short_of_the_checkpoint(
    whole: tuple[Path, Config], tmp_path: Path, left: int, start: int
) -> None:
    """The run goes back to the newest checkpoint that has all of its records, and says so."""
    directory, config = whole
    interrupted(config, tmp_path / "part", 3)
    file = tmp_path / "part" / "records.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:left]))
    said: list[str] = []
    run = api.resume(tmp_path / "part", say=said.append)
    assert run.state.round == len(run.records) == start
    assert "records.jsonl lacks rounds that checkpoint-000003.json was made with (3)" in said[-1]
    assert said[-1].endswith(f"resuming from round {start}")
    run.run().close()
    assert finished(tmp_path / "part") == finished(directory)


def test_more_rounds_continue_a_finished_run(whole: tuple[Path, Config], tmp_path: Path) -> None:
    directory, config = whole
    api.train(config.replace(train={"rounds": 3}), tmp_path / "short")
    run = api.resume(tmp_path / "short")
    assert run.finished
    run.close()
    api.resume(tmp_path / "short", rounds=5).run().close()
    assert finished(tmp_path / "short") == finished(directory)
    with pytest.raises(FeddumapError, match=r"--rounds 2: .* has 5 rounds already"):
        api.resume(tmp_path / "short", rounds=2)


COMMAND = [sys.executable, "-m", "feddumap"]
SETTINGS = [
    "data.devices=6",
    "model.name=lenet",
    "train.rounds=5",
    "train.cohort=3",
    "train.epochs=100",
    "train.batch=8",
    "train.lr=0.05",
]


def command(*arguments: str) -> list[str]:
    return [*COMMAND, *arguments]


def train_command(directory: Path, workers: int) -> list[str]:
    sets = [part for setting in [*SETTINGS, f"run.workers={workers}"] for part in ("--set", setting)]
    return command("train", *sets, "--out", str(directory))


@pytest.fixture(scope="module")
def reference(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the kills below interrupt, left in peace."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        subprocess.run(train_command(directory, 1), check=True, capture_output=True)
    return directory


@pytest.mark.parametrize(
    ("how", "workers", "part", "code"),
    [
        pytest.param(signal.SIGKILL, 2, 0.2, -9, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, 0.4, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, 0.6, 143, marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_of_a_round(
    home: Path, reference: Path, tmp_path: Path, how: signal.Signals, workers: int, part: float, code: int
) -> None:
    """When about this part of the third of five rounds is over."""
    directory = tmp_path / "killed"
    process = subprocess.Popen(
        train_command(directory, workers),
        stderr=subprocess.PIPE,
        text=True,
        # a test run in the background of a shell inherits an ignored Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    first, second = (wait_for_records(directory, count) for count in (1, 2))
    time.sleep(part * (second - first))
    os.kill(process.pid, how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    if how != signal.SIGKILL:
        assert f"resume with: feddumap resume {directory}" in " ".join(errors.split())
        assert "Traceback" not in errors
    assert not (directory / "summary.json").exists()
    done = subprocess.run(command("resume", str(directory)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert finished(directory) == finished(reference)


def test_a_run_is_not_written_by_two_processes(whole: tuple[Path, Config]) -> None:
    held = RunDirectory.open(whole[0])
    with pytest.raises(FeddumapError, match="is in use by another process"):
        api.resume(whole[0])
    held.close()
    api.resume(whole[0]).close()


def test_an_existing_directory_is_never_trained_over(whole: tuple[Path, Config], tmp_path: Path) -> None:
    directory, config = whole
    before = finished(directory)
    with pytest.raises(
        FeddumapError, match=f"holds this run already: continue it with `feddumap resume {directory}"
    ):
        api.start(config, directory)
    other = config.replace(train={"lr": 0.01})
    with pytest.raises(FeddumapError, match=r"another configuration \(train.lr is 0.05 there, 0.01 here\)"):
        api.start(other, directory)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep me")
    with pytest.raises(FeddumapError, match="exists and is not a run directory"):
        api.start(config, tmp_path / "mine")
    with pytest.raises(FeddumapError, match="is a file"):
        api.start(config, tmp_path / "mine" / "letter.txt")
    with pytest.raises(FeddumapError, match="is not a run directory"):
        api.resume(tmp_path / "mine")
    assert finished(directory) == before
    assert (tmp_path / "mine" / "letter.txt").read_text() == "keep me"


def test_a_full_disk_loses_nothing(
    whole: tuple[Path, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of a later checkpoint fails: the earlier ones stay, no temporary file does."""
    directory, config = whole
    real, calls = atomic_files.sync, 0

    def full(path: Path) -> None:
        nonlocal calls
        calls += path.suffix == ".tmp" and "safetensors" in path.name and "checkpoint" in path.name
        if calls >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path)

    monkeypatch.setattr(atomic_files, "sync", full)
    run = api.start(config, tmp_path / "part")
    with pytest.raises(OSError, match="No space left"):
        run.run()
    run.close()
    monkeypatch.setattr(atomic_files, "sync", real)
    assert not list((tmp_path / "part").glob("*.tmp"))
    assert not list((tmp_path / "part").glob(".*.tmp"))
    api.resume(tmp_path / "part").run().close()
    assert finished(tmp_path / "part") == finished(directory)


def test_a_directory_that_cannot_be_made_whole_is_not_left_behind(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(atomic_files, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        api.start(small(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Immutable:
    """The `os` of `atomic_files` while records.jsonl cannot be opened or, with `half`, the disk is full after
    half of a record."""

    def __init__(self, half: bool) -> None:
        self.half = half

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if not self.half and Path(path).name == "records.jsonl" and flags & os.O_APPEND:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return os.open(path, flags, mode)

    def write(self, fd: int, data: memoryview) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "records.jsonl":
            if len(data) < 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.write(fd, data[: len(data) // 2])
        return os.write(fd, data)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_a_record_that_cannot_be_written_is_not_counted(
    whole: tuple[Path, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool, every: int
) -> None:
    """Neither in memory, nor by the trackers, nor in the checkpoint that ends the iteration."""
    directory, config = whole
    part = tmp_path / "part"
    run = api.start(config.replace(run={"checkpoint_every": every}), part)
    iterator = iter(run)
    for _ in range(2):
        next(iterator)
    before = (part / "records.jsonl").read_bytes()
    tracked: list[int] = []
    run._trackers = [SimpleNamespace(add=lambda record: tracked.append(record["round"]), close=int)]
    monkeypatch.setattr(atomic_files, "os", Immutable(half))
    with pytest.raises(OSError, match=r"(Operation not permitted|No space left on device).*records\.jsonl"):
        next(iterator)
    monkeypatch.setattr(atomic_files, "os", os)
    assert run.state.round == len(run.records) == 2
    assert tracked == []
    assert (part / "records.jsonl").read_bytes() == before
    assert max(part.glob("checkpoint-*.json")).name == "checkpoint-000002.json"
    next(iter(run))  # the same run can go on
    assert tracked == [2]
    run.close()
    api.resume(part).run().close()
    assert finished(part) == finished(directory)


def test_a_repeated_round_replaces_its_record(home: Path, tmp_path: Path) -> None:
    """The iteration was interrupted between the record and the state."""
    config = small(train={"rounds": 2})
    run = api.start(config, tmp_path / "run")
    next(iter(run))
    assert run.directory is not None
    run.directory.append({**run.records[0], "round": 1})
    run.run().close()
    assert [record["round"] for record in read_records(tmp_path / "run")] == [0, 1]
    run = api.resume(tmp_path / "run")
    assert run.finished
    run.close()


@pytest.mark.parametrize(
    "files", [["split.safetensors"], [".split.safetensors.1.tmp"], [".config.toml.9.tmp"]]
)
def test_a_creation_that_was_killed_is_begun_again(
    whole: tuple[Path, Config], tmp_path: Path, files: list[str]
) -> None:
    directory, config = whole
    part = tmp_path / "part"
    part.mkdir()
    for name in [".lock", *files]:
        (part / name).write_bytes(b"half")
    held = RunDirectory(part) if files == ["split.safetensors"] else None
    if held is not None:
        with pytest.raises(FeddumapError, match="is in use by another process"):
            api.start(config, part)
        held.close()
    api.train(config, part)
    assert finished(part) == finished(directory)
    assert not list(part.glob(".*.tmp"))


def test_resuming_a_creation_that_was_killed(home: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.mkdir()
    for name in (".lock", "split.safetensors", ".first-weights.safetensors.7.tmp"):
        (part / name).touch()
    with pytest.raises(FeddumapError, match="interrupted before its directory was complete"):
        api.resume(part)
    assert not part.exists()
    part.mkdir()
    for name in (".lock", "split.safetensors", "notes.txt"):  # somebody else's file
        (part / name).touch()
    with pytest.raises(FeddumapError, match="is not a run directory"):
        api.resume(part)
    with pytest.raises(FeddumapError, match="is not a run directory"):
        api.start(small(), part)
    assert len(list(part.iterdir())) == 3


def test_resuming_deletes_temporary_files(whole: tuple[Path, Config]) -> None:
    directory, _ = whole
    ours = [".records.jsonl.12.tmp", ".checkpoint-000005.safetensors.12.tmp", ".summary.json.12.tmp"]
    for name in [*ours, ".letter.txt.12.tmp", "x.tmp"]:
        (directory / name).touch()
    api.resume(directory).close()
    assert {path.name for path in directory.glob("*.tmp")} == {"x.tmp", ".letter.txt.12.tmp"}


def test_no_pickle_is_read(whole: tuple[Path, Config]) -> None:
    """A checkpoint that is a pickle in disguise is data that does not fit, not a program."""
    path = whole[0] / "checkpoint-000005.safetensors"
    torch.save({"w": torch.zeros(1)}, path)
    with pytest.raises(FeddumapError, match="checksum of its tensors"):
        read_checkpoint(path.with_suffix(".json"))


def test_smoothing_is_the_papers_filter() -> None:
    """Savitzky-Golay written out: the centre value of a cubic fitted to 39 points."""
    rng = np.random.default_rng(0)
    curve = rng.random(80)
    places = np.arange(-19, 20)
    design = np.vander(places, 4, increasing=True)
    middle = [(np.linalg.lstsq(design, curve[i - 19 : i + 20], rcond=None)[0])[0] for i in range(19, 61)]
    np.testing.assert_allclose(smooth(curve.tolist())[19:61], middle, atol=1e-12)
    for length in range(1, 60):
        assert len(smooth(curve[:length].tolist())) == length
    step = [0.1] * 30 + [1.0] * 30  # a cubic through it would exceed 1
    assert smooth(step).max() == 1.0


def test_summary_figures() -> None:
    values = [i / 100 for i in range(60)]
    records = [{"round": i, "accuracy": value, "clock": 2.0 * i} for i, value in enumerate(values)]
    got = accuracies(records)
    assert got["final"] == got["best"] == 0.59
    assert got["mean10"] == pytest.approx(sum(values[-10:]) / 10)
    assert got["best_smoothed"] == pytest.approx(0.59)  # a straight line is its own smoothing
    assert reached(records, 0.305) == {"round": 31, "clock": 62.0}
    assert reached(records, 0.6) is None
    sparse = [{**record, "accuracy": None} if record["round"] % 2 else record for record in records]
    assert reached(sparse, 0.305) == {"round": 32, "clock": 64.0}
    assert accuracies([{"round": 0, "accuracy": None, "clock": 1.0}])["final"] is None
