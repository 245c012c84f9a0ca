"""What a run shows in a terminal."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest

from feddumap import run as api
from feddumap.progress import follow
from feddumap.system import console
from tests.conftest import small


def plain_lines(terminal: console.SafeConsole) -> list[str]:
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    return re.split(r"[\r\n]+|\x1b\[[\d;?]*[A-Za-z]", shown)


@pytest.mark.parametrize("width", [60, 80])
def test_the_time_left_is_whole_in_a_narrow_terminal(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    terminal = console.SafeConsole(file=StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(console, "out", terminal)
    config = small(method={"name": "feddumap-cs", "shared_samples": 10, "prune_round": 2})
    follow(api.start(config, tmp_path / "run"), "feddumap-cs")
    lines = [line for line in plain_lines(terminal) if "round" in line]
    assert lines[-1].startswith("feddumap-cs round 3/3")
    assert not [line for line in lines if not re.search(r"left (\d+:\d\d:\d\d|-:--:--)\s*$", line)]
    assert all(line.count("left") == 1 for line in lines), "a part of a round has no time left of its own"


def test_a_note_is_a_line_of_its_own(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = console.SafeConsole(file=StringIO(), force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(console, "out", terminal)
    monkeypatch.setattr(console, "err", terminal)
    config = small(method={"name": "feddumap", "prune_round": 30})
    follow(api.start(config, tmp_path / "run", console.say))
    (said,) = [line for line in plain_lines(terminal) if "prune_round" in line]
    assert said == "method.prune_round = 30 is not reached in 3 rounds: nothing will be pruned"


def test_a_finished_run_has_no_bar(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.train(small(), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    terminal = console.SafeConsole(file=StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(console, "out", terminal)
    run = api.resume(tmp_path / "run")
    follow(run)
    run.close()
    assert terminal.file.getvalue() == ""  # type: ignore[attr-defined]
    assert (tmp_path / "run" / "summary.json").exists()
