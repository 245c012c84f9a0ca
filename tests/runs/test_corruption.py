"""Files of a run directory that rot: whatever changes in them, a resumed run either ends with the same bits
or says what is wrong. Nothing is silently different."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from feddumap import run as api
from feddumap.errors import FeddumapError
from tests.conftest import small
from tests.support.faults import outcome
from tests.support.runs import interrupted

SIGNS = ("damaged", "cannot be used", "was altered", "lacks rounds", "train.rounds is")
"""What is said where a file is not as it was written."""


def flip(data: bytes, dice: random.Random, text: bool) -> bytes:
    """Another bit or, in a text, another digit."""
    places = [i for i, byte in enumerate(data) if chr(byte).isdigit()] if text else range(len(data))
    if not len(places):
        return data[:-1]
    place = dice.choice(places)
    new = (data[place] - 48 + 1) % 10 + 48 if text else data[place] ^ (1 << dice.randrange(8))
    return data[:place] + bytes([new]) + data[place + 1 :]


def corrupt(directory: Path, dice: random.Random) -> str:
    """Change, cut, empty, delete or swap files; returns what was done."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    path = dice.choice(files)
    text = path.suffix in (".toml", ".json", ".jsonl")
    how = dice.choice(["flip", "flip", "digit" if text else "flip", "cut", "empty", "delete", "swap"])
    data = path.read_bytes()
    if how in ("flip", "digit"):
        path.write_bytes(flip(data, dice, text=how == "digit"))
    elif how == "cut":
        path.write_bytes(data[: dice.randrange(len(data) + 1)])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "delete":
        path.unlink()
    else:
        other = dice.choice([each for each in files if each.suffix == path.suffix])
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    return f"{how} {path.relative_to(directory)}"


@pytest.fixture(scope="module")
def runs(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that was left after three of four rounds, and the results of the whole."""
    folder = tmp_path_factory.mktemp("corruption")
    config = small(method={"name": "scaffold"}, train={"rounds": 4, "cohort": 2}, data={"devices": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        api.train(config, folder / "whole")
        interrupted(config, folder / "part", 3)
    return folder / "part", outcome(folder / "whole")


def attack(runs: tuple[Path, Any], folder: Path, seed: int) -> str:
    """Corrupt a copy and resume it: "unharmed", "said" or "refused"."""
    copy = shutil.copytree(runs[0], folder / f"run-{seed}")
    what = corrupt(copy, random.Random(seed))
    said: list[str] = []
    try:
        with api.resume(copy, say=said.append) as run:
            run.run()
    except FeddumapError as error:
        if str(copy) not in str(error):
            raise AssertionError(f"{what} (seed {seed}) is refused without the name of the run") from error
        shutil.rmtree(copy)
        return "refused"
    told = any(sign in line for line in said for sign in SIGNS)
    same = outcome(copy) == runs[1]
    assert same or any("train.rounds is" in line for line in said), (seed, what, said)
    shutil.rmtree(copy)
    return "said" if told else "unharmed"


def test_some_corruptions(home: Path, runs: tuple[Path, Any], tmp_path: Path) -> None:
    assert {attack(runs, tmp_path, seed) for seed in range(12)} >= {"said", "refused"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_corruptions(
    home: Path, runs: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [attack(runs, tmp_path, seed) for seed in range(400)]
    with capsys.disabled():
        counts = ", ".join(f"{found.count(each)} {each}" for each in ("unharmed", "said", "refused"))
        print(f"\n{len(found)} corruptions: {counts}, 0 silent")
