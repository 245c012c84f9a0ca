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


def terminal(width: int) -> console.SafeConsole:
    return console.SafeConsole(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def written(screen: console.SafeConsole) -> list[str]:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def cells_of(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]


ROWS = [("device-momentum", "10.0 %", "153,293,824", "3 min 31 s"), ("fedavg", "9.3 %", "4", "2.0 s")]
COLUMNS = ("method", "accuracy", "devices_worst_tenth", "virtual time")


def test_a_table_that_does_not_fit_continues_below(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(50)
    monkeypatch.setattr(console, "out", screen)
    console.table("All methods", COLUMNS, ROWS, right=COLUMNS)
    lines = written(screen)
    assert max(map(len, lines)) <= 50
    text = [line for line in lines if line[0] in "│┃"]
    # 4 + 15 + 3 + 8 + 3 + 19 is wider than 50, so the third column is in a table of its own
    assert cells_of(text) == [
        ["method", "accuracy"],
        ["device-momentum", "10.0 %"],
        ["fedavg", "9.3 %"],
        ["method", "devices_worst_tenth"],
        ["device-momentum", "153,293,824"],
        ["fedavg", "4"],
        ["method", "virtual time"],
        ["device-momentum", "3 min 31 s"],
        ["fedavg", "2.0 s"],
    ]
    assert [line.strip() for line in lines if "All methods" in line] == ["All methods"]


@pytest.mark.parametrize(
    ("width", "header"),
    [
        (38, [["method", "virtual time", "down"]]),  # 9 + 12 + 7 and 10 for spaces and lines
        (33, [["", "virtual", ""], ["method", "time", "down"]]),  # 9 + 7 + 7 + 10
        (32, [["method", "virtual time"]]),
    ],
)
def test_titles_break_between_words_before_optional_columns_are_left_out(
    monkeypatch: pytest.MonkeyPatch, width: int, header: list[list[str]]
) -> None:
    screen = terminal(width)
    monkeypatch.setattr(console, "out", screen)
    rows = [("feddf", "3 s", "625 kB"), ("mime-lite", "4 s", "1.25 MB")]
    columns = ("method", "virtual time", "down")
    console.table("", columns, rows, right=columns[1:], optional=["down"])
    lines = written(screen)
    assert max(map(len, lines)) <= width
    assert cells_of(lines[1 : 1 + len(header)]) == header
    assert len(lines) == len(header) + 5


def test_notes_break_between_words_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "feddumap: runs/a is there already (model.name is 'lenet' there): give `feddumap resume runs/a`"
    screen = terminal(40)
    monkeypatch.setattr(console, "err", screen)
    console.say(said)
    lines = written(screen)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert " ".join(lines) == said, "no word is broken"
    assert any("`feddumap resume runs/a`" in line for line in lines), "nor a command"
    file = console.SafeConsole(file=io.StringIO(), width=40, soft_wrap=True)
    monkeypatch.setattr(console, "err", file)
    console.say(said)
    assert written(file) == [said]
