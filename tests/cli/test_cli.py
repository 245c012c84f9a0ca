"""The command line as a person meets it: output, errors in one sentence, exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from feddumap import __version__
from feddumap.system import atomic_files
from tests.support.command_line import CommandLine

SMALL = (
    "data.devices=6 model.name=lenet train.rounds=2 train.cohort=2 "
    "train.epochs=1 train.batch=50 run.workers=1"
)


def sets(text: str) -> list[str]:
    return [part for setting in text.split() for part in ("--set", setting)]


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Call the command line in this process; returns exit code, output and errors."""
    return CommandLine(monkeypatch, capsys)


def test_train_resume_and_summary(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "first"
    code, printed, _ = run("train", *sets(SMALL), "--out", str(out))
    assert code == 0
    assert "round 2/2 · accuracy" in printed
    assert "final accuracy" in printed
    assert str(out) in printed.replace("\n", "")
    code, _, errors = run("resume", str(out))
    assert code == 0
    assert "is finished (2 rounds)" in errors
    code, printed, errors = run("resume", str(out), "--rounds", "3")
    assert code == 0
    assert "resuming after 2 of 3 rounds" in errors
    assert len((out / "records.jsonl").read_text().splitlines()) == 3


def test_a_configuration_file_and_a_default_directory(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text('[model]\nname = "lenet"\n[run]\nseed = 5\nworkers = 1\n')
    code, _, _ = run("train", "c.toml", *sets(SMALL))
    assert code == 0
    assert (tmp_path / "runs" / "fedavg-lenet-digits-5" / "summary.json").exists()


BAD = [
    ("train.rounds=0", "train.rounds = 0: input should be greater than or equal to 1"),
    ("train.lr=-1", "train.lr = -1: input should be greater than 0"),
    ("train.rouns=3", "unknown key train.rouns: did you mean train.rounds?"),
    ("train.cohort=7 data.devices=6", "train.cohort = 7 is larger than data.devices = 6"),
    ("data.devices=5000 data.partition=iid", "data.devices = 5000: expected at most 1197"),
    ("data.devices=1000", "data.shards_per_device = 2: expected at most 1"),
    ("data.server_fraction=0.9", "data.server_fraction = 0.9: expected at most 0.25"),
    ("data.server_classes=11", "data.server_classes = 11: expected at most 10"),
    ("data.name=mnist", "unknown data set 'mnist'"),
    ("data.name=absent.npz", "cannot read the data set: no file or folder 'absent.npz' in /"),
    ('data.name=""', "data.name = '': expected a name or a path"),
    (r'data.name="a\u0000b.npz"', r"data.name = 'a\x00b.npz': expected a name or a path"),
    (r'data.test="a\u0000b"', r"data.test = 'a\x00b': expected a name or a path"),
    ("model.name=lenett", "unknown model 'lenett': did you mean 'lenet'?"),
    ("model.name=nowhere:net", "model 'nowhere:net' cannot be imported"),
    ("method.name=fedavgg", "unknown method 'fedavgg': did you mean 'fedavg'?"),
    ("method.c=1", "unknown key method.c"),
    ("run.device=cuda:7", "run.device = 'cuda:7' cannot be used here"),
    ("run.device=toaster", "run.device = 'toaster' cannot be used here"),
    ("clock.profile=general clock.fleet=absent.csv", "absent.csv"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[settings for settings, _ in BAD])
def test_a_mistake_is_one_sentence_and_leaves_nothing(  # type: ignore[no-untyped-def]
    run, tmp_path: Path, settings: str, message: str
) -> None:
    code, _, errors = run("train", *sets(settings), "--out", str(tmp_path / "out"))
    assert code == 2
    sentence = errors.strip().splitlines()[-1]
    assert sentence.startswith("feddumap: ")
    assert message in sentence
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_an_existing_run_is_refused(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = str(tmp_path / "first")
    assert run("train", *sets(SMALL), "--out", out)[0] == 0
    code, _, errors = run("train", *sets(SMALL), "--out", out)
    assert code == 2
    assert f"feddumap resume {out}" in errors.replace("\n", " ")


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write anywhere, so permissions cannot be tested as root"
)
def test_no_permission(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tmp_path.chmod(0o500)
    code, _, errors = run("train", *sets(SMALL), "--out", str(tmp_path / "out"))
    tmp_path.chmod(0o700)
    assert code == 2
    assert "Permission denied" in errors


def test_a_place_that_cannot_be_written(run) -> None:  # type: ignore[no-untyped-def]
    code, _, errors = run("train", *sets(SMALL), "--out", "/proc/nowhere/run")
    assert code == 2
    assert errors.strip().splitlines()[-1].startswith("feddumap: cannot write or read /proc/nowhere")


def test_a_full_disk_says_how_to_go_on(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    real = atomic_files.sync

    def full(path: Path) -> None:
        if "checkpoint-000002.safetensors" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path)

    monkeypatch.setattr(atomic_files, "sync", full)
    out = tmp_path / "out"
    code, _, errors = run("train", *sets(SMALL), "--out", str(out))
    assert code == 2
    sentence = errors.strip().splitlines()[-1]
    assert "No space left on device" in sentence
    assert f"then run `feddumap resume {out}`" in sentence
    monkeypatch.setattr(atomic_files, "sync", real)
    assert run("resume", str(out))[0] == 0


def test_resuming_what_is_no_run(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, errors = run("resume", str(tmp_path))
    assert code == 2
    assert "is not a run directory" in errors
    assert "feddumap grid" not in errors
    (tmp_path / "fedavg").mkdir()
    (tmp_path / "fedavg" / "config.toml").touch()
    code, _, errors = run("resume", str(tmp_path))
    assert (code, "repeat the command, such as `feddumap grid`, that began them" in errors) == (2, True)


@pytest.mark.parametrize(
    ("name", "classes", "parameters", "macs"),
    [("cnn", 10, 122_570, 4_548_608), ("lenet", 100, 69_656, 659_280), ("vgg11", 10, 9_750_922, 153_293_824)],
)
def test_inspect_model(run, name: str, classes: int, parameters: int, macs: int) -> None:  # type: ignore[no-untyped-def]
    code, printed, _ = run("inspect", "model", name, "--classes", str(classes), "--json")
    value = json.loads(printed)
    assert (code, value["parameters"], value["macs"]) == (0, parameters, macs)
    assert sum(layer["parameters"] for layer in value["layers"]) == parameters
    code, printed, _ = run("inspect", "model", name, "--classes", str(classes))
    assert f"{parameters:,}" in printed
    assert f"{macs:,}" in printed


def test_inspect_data(run) -> None:  # type: ignore[no-untyped-def]
    code, printed, _ = run("inspect", "data", "digits", "--json", "--set", "data.devices=20")
    value = json.loads(printed)
    assert code == 0
    assert value["server"]["degree"] == pytest.approx(0.311, abs=0.01)
    assert len(value["degree_devices"]["each"]) == 20
    assert 0 < value["degree_cohort"] < value["degree_devices"]["mean"] < 1
    code, printed, _ = run("inspect", "data", "digits", "--set", "data.devices=20")
    assert "non-IID degree of the server" in printed


def test_inspect_own_data(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = "".join(f"{i},{i % 3},{'ab'[i % 2]},u{i % 4}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("x,y,kind,who\n" + rows)
    keys = ["--set", "data.label=kind", "--set", "data.user=who"]
    code, printed, _ = run("inspect", "data", str(tmp_path / "t.csv"), "--json", *keys)
    value = json.loads(printed)
    assert (code, value["input"], value["devices"]) == (0, "numbers 2", 6)
    assert value["labels"]["train"].keys() == {"a", "b"}
    assert sum(value["labels"]["train"].values()) == 32
    assert (value["users"]["count"], value["users"]["nobody"]) == (4, 0)
    code, printed, _ = run(
        "inspect", "data", str(tmp_path / "t.csv"), *keys, "--set", "data.partition=natural"
    )
    assert code == 0
    assert "4, natural" in printed
    assert "numbers 2" in printed
    code, printed, _ = run("data", "get", str(tmp_path / "t.csv"), *keys)
    assert (code, "32 training and 8 test samples (numbers 2), 2 classes" in printed) == (0, True)
    code, _, said = run("inspect", "data", str(tmp_path / "t.csv"), "--set", "data.label=x")
    assert code == 2
    assert "t.csv" in said


def test_methods(run) -> None:  # type: ignore[no-untyped-def]
    code, printed, _ = run("methods", "--json")
    assert code == 0
    assert "fedavg" in json.loads(printed)
    assert "fedavg" in run("methods")[1]


def test_data_list_and_get(run) -> None:  # type: ignore[no-untyped-def]
    code, printed, _ = run("data", "list", "--json")
    rows = {row["name"]: row for row in json.loads(printed)}
    assert code == 0
    assert rows["digits"]["cached"] is True
    assert "cifar100" in run("data", "list")[1]
    code, printed, errors = run("data", "get", "digits")
    assert code == 0
    assert "1,497 training and 300 test" in printed
    assert "from the cache" in errors


def test_ones_own_data(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    path = tmp_path / "own.npz"
    labels = np.arange(200) % 4
    images = rng.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    np.savez(path, train_inputs=images, train_labels=labels, test_inputs=images[:40], test_labels=labels[:40])
    code, printed, _ = run("train", *sets(f"{SMALL} data.name={path}"), "--out", str(tmp_path / "out"))
    assert code == 0
    assert "own.npz" in printed
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["dataset"] == "own.npz"


def test_help_explains_every_key(run) -> None:  # type: ignore[no-untyped-def]
    from feddumap.config import describe

    code, printed, _ = run("train", "--help")
    assert code == 0
    flat = " ".join(printed.split())
    for key, _, _, text in describe():
        assert key in flat
        assert text.split(",")[0].split(";")[0] in flat, key


def test_demo(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, printed, _ = run("demo", "--rounds", "1", "--out", str(tmp_path / "demo"))
    assert code == 0
    assert "final accuracy" in printed
    assert "multiply-adds" in printed
    for name in ("fedavg", "feddumap", "feddumap-cs"):
        assert (tmp_path / "demo" / name / "summary.json").exists()


def test_version_and_module(home: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "feddumap", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == __version__


def test_wrong_usage_has_exit_code_2(run) -> None:  # type: ignore[no-untyped-def]
    assert run("train", "--bogus")[0] == 2
    assert run("nonsense")[0] == 2
    assert run()[0] == 2


def test_the_cache_is_mentioned_when_something_is_new_there(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "t.csv"
    path.write_text("x,label\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(100)))
    given = sets(f"{SMALL} model.name=mlp data.name={path}")
    assert "now cached in" in run("train", *given, "--out", str(tmp_path / "first"))[2]
    code, _, errors = run("train", *given, "--out", str(tmp_path / "second"))
    assert (code, "cache" in errors) == (0, False)
    assert "from the cache" in run("inspect", "data", str(path), *sets("data.devices=6"))[2]
