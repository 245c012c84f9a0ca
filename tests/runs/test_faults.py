"""Every file operation and every message of a short run fails once, in turn, and nothing is lost: the run
goes on afterwards to the same bits."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from feddumap.config import Config
from feddumap.engine.resolution import resolve
from feddumap.system.callbacks import ignore
from tests.conftest import small
from tests.support.faults import (
    BUG,
    FINISHED,
    STOPPED,
    Fault,
    FaultyOs,
    FaultyPipes,
    Way,
    outcome,
    survive,
    train,
)

SAMPLE = 12


@dataclass(frozen=True)
class Case:
    """A short run: its configuration, the directory that it begins from, if any, and its results."""

    config: Config
    begun: Path | None
    kind: type[Fault]
    done: list[str]
    expected: Any

    def faults(self) -> list[tuple[int, Way]]:
        """All of them: errors and kills at every operation, half-done writes at every write."""
        halves: tuple[Way, ...] = ("short", "torn")
        whole: tuple[Way, ...] = ("error", "kill")
        return [
            (place, way)
            for place, name in enumerate(self.done)
            for way in (*whole, *(halves if name in ("write", "_send") else ()))
        ]

    def survive(self, place: int, way: Way, out: Path) -> None:
        if self.begun is not None:
            shutil.copytree(self.begun, out)
        code, result = survive(self.config, out, self.kind(place, way))
        what = f"{way} at operation {place} ({self.done[place]}), exit code {code}"
        assert code != BUG, what
        assert code in (FINISHED, STOPPED, -9), what
        assert (code == -9) == (way in ("kill", "torn")), what
        assert result == self.expected, what


def make(folder: Path, kind: type[Fault], workers: int = 1, begun: int = 0) -> Case:
    """A run of two rounds with device states, and its operations; with `begun`, from an unfinished run."""
    keys = {"rounds": 2, "cohort": 2}
    config = small(method={"name": "scaffold"}, train=keys, run={"workers": workers}, data={"devices": 4})
    resolve(config, ignore)  # the data set's cache is verified, which is written there once
    start = None
    if begun:
        start = folder / "begun"
        train(config.replace(train={"rounds": begun}), folder / "short", FaultyOs())
        shutil.copytree(folder / "short", start)
        text = (start / "config.toml").read_text()
        (start / "config.toml").write_text(text.replace(f"rounds = {begun}", "rounds = 2"))
        (start / "summary.json").unlink()
        with (start / "records.jsonl").open("a") as file:
            file.write('{"round": 1, "accu')
        (start / ".checkpoint-000002.json.1.tmp").touch()
        (start / "checkpoint-000002.safetensors").touch()
        shutil.copytree(start, folder / "whole")
    code, done = train(config, folder / "whole", kind())
    assert code == FINISHED
    return Case(config, start, kind, done, outcome(folder / "whole"))


@pytest.fixture(scope="module")
def cases(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        folder = tmp_path_factory.mktemp("faults")
        made = {
            "files": make(folder / "files", FaultyOs),
            "files of a resumed run": make(folder / "resumed", FaultyOs, begun=1),
            "messages": make(folder / "messages", FaultyPipes, workers=2),
        }
    assert made["files"].expected == made["messages"].expected == made["files of a resumed run"].expected
    return made


def spread(all_of_them: list[tuple[int, Way]], count: int) -> list[tuple[int, Way]]:
    """Some of the faults, of every way, from the first to the last."""
    step = max(1, len(all_of_them) // count)
    return all_of_them[:: step + (step % 2 == 0)][:count]


def test_the_harness_sees_every_kind_of_operation(cases: dict[str, Case]) -> None:
    assert {"open", "write", "fsync", "replace", "makedirs"} <= set(cases["files"].done)
    assert {"unlink", "write", "replace"} <= set(cases["files of a resumed run"].done)
    assert set(cases["messages"].done) == {"_send", "_receive"}


@pytest.mark.parametrize("name", ["files", "files of a resumed run", "messages"])
def test_a_sample_of_faults(home: Path, cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    case = cases[name]
    for place, way in spread(case.faults(), SAMPLE // 3):
        case.survive(place, way, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["files", "files of a resumed run", "messages"])
def test_every_fault(
    home: Path, cases: dict[str, Case], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = cases[name]
    faults = case.faults()
    for place, way in faults:
        case.survive(place, way, tmp_path / "run")
    with capsys.disabled():
        print(f"\n{name}: {len(case.done)} operations, {len(faults)} faults, {len(faults)} survived, 0 lost")
