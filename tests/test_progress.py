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


@pytest.mark.parametrize("width", [60, 80])
def test_the_time_left_is_whole_in_a_narrow_terminal(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    terminal = console.SafeConsole(file=StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(console, "out", terminal)
    config = small(method={"name": "feddumap-cs", "shared_samples": 10, "prune_round": 2})
    follow(api.start(config, tmp_path / "run"), "feddumap-cs")
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in re.split(r"[\r\n]+|\x1b\[[\d;?]*[A-Za-z]", shown) if "round" in line]
    assert lines[-1].startswith("feddumap-cs round 3/3")
    assert not [line for line in lines if not re.search(r"left (\d+:\d\d:\d\d|-:--:--)\s*$", line)]
