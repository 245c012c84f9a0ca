"""What is shown while something runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from feddumap import progress
from feddumap import run as api
from feddumap.system import console
from feddumap.system.console import Pace
from tests.conftest import small


def test_pace_estimates_from_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    pace = Pace()
    assert pace("pruning rates", 0, 10) == "pruning rates 0/10"
    now = 108.0
    assert pace("pruning rates", 2, 10) == "pruning rates 2/10 · left 32.0 s"  # 4 s each, 8 to go
    assert pace("server steps", 5, 10) == "server steps 5/10"  # something else begins
    now = 109.0
    assert pace("server steps", 6, 10) == "server steps 6/10 · left 4.0 s"
    assert pace("server steps", 0, 10) == "server steps 0/10"  # and begins again


def test_a_terminal_gets_a_live_line(home: object, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=screen, force_terminal=True, width=120))
    progress.follow(api.start(small(method={"name": "feddu"})), "mine")
    shown = screen.getvalue()
    assert "mine round 3/3" in shown
    assert "accuracy" in shown
    assert "clock" in shown


def test_runs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=screen, width=120))
    one = {
        "method": "fedavg",
        "accuracy": {"final": 0.5, "mean10": 0.4},
        "targets": {"0.4": {"round": 3, "clock": 40.0}, "0.6": None},
        "clock": 100.0,
        "parameters": 1000,
        "macs": 4000,
        "bytes_down": 10_000_000,
        "bytes_up": 10_000_000,
    }
    two = {
        **one,
        "method": "feddumap",
        "clock": 80.0,
        "macs": 3000,
        "targets": {"0.4": None, "0.6": {"clock": 70.0}},
    }
    progress.side_by_side([one, two])
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:-1]
        for line in screen.getvalue().splitlines()
        if "│" in line
    }
    cells = {name: [cell.strip() for cell in row] for name, row in rows.items()}
    assert cells["total virtual time"] == ["1 min 40 s", "1 min 20 s (-20%)"]
    assert cells["multiply-adds per image"] == ["4,000", "3,000 (-25%)"]
    assert cells["virtual time to 40.0 %"] == ["40.0 s", "-"]
    assert cells["virtual time to 60.0 %"] == ["-", "1 min 10 s"]
    assert cells["final accuracy"] == ["50.0 %", "50.0 %"]
