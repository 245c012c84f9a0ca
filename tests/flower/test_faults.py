"""Every message between a server and its nodes fails once, in turn, and the run ends with the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from flwr.app import Error, Message, RecordDict

from feddumap import run as api
from feddumap.flower.server import cohort
from feddumap.runs.verify import Verification
from tests.support.faults import outcome
from tests.support.flower import DEVICES, config_of
from tests.support.flower_grid import FakeGrid

Way = Literal["lost", "error", "killed before", "killed after"]
WAYS: tuple[Way, ...] = ("lost", "error", "killed before", "killed after")


class Killed(BaseException):
    """The server's process ends here, as far as its run directory is concerned."""


class FaultyGrid(FakeGrid):
    """A grid of which one message fails: no reply, an error as the reply, or the server is killed before or
    after the node has done its work."""

    @staticmethod
    def make(state: Path, at: int = -1, way: Way = "lost") -> FaultyGrid:
        grid = FaultyGrid(FakeGrid.of(DEVICES, state=str(state)).nodes)
        grid.at, grid.way, grid.count = at, way, 0
        for node in grid.nodes.values():
            node.mischief = grid.answer
        return grid

    at: int
    way: Way
    count: int

    def answer(self, _: Message, content: RecordDict) -> RecordDict | Error | None:
        if self.count != self.at + 1 or self.way.startswith("killed"):
            return content
        return Error(0, "broken on purpose") if self.way == "error" else None

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent: list[str] = []
        for message in messages:
            hit = self.count == self.at
            self.count += 1
            if hit and self.way == "killed before":
                raise Killed
            sent += super().push_messages([message])
            if hit and self.way == "killed after":
                raise Killed
        return sent


def train(out: Path, grid: FaultyGrid) -> None:
    config = config_of("scaffold", train={"rounds": 2, "cohort": 2}, run={"least_share": 1.0})
    with api.begin(config, out) as run:
        run.engine = partial(cohort, grid)
        run.run()


def survive(folder: Path, at: int, way: Way) -> None:
    folder.mkdir()
    faulty = FaultyGrid.make(folder / "state", at, way)
    try:
        train(folder / "run", faulty)
        assert not way.startswith("killed")
    except Killed:
        train(folder / "run", FaultyGrid.make(folder / "state"))
    assert faulty.count > at
    assert {found.state for found in Verification(folder / "run", repair=False).run()} == {"ok"}


@pytest.fixture
def whole(home: Path, tmp_path: Path) -> tuple[int, object]:
    """The number of messages of an undisturbed run, and its results."""
    grid = FaultyGrid.make(tmp_path / "whole" / "state")
    train(tmp_path / "whole" / "run", grid)
    return grid.count, outcome(tmp_path / "whole" / "run")


def test_a_sample_of_messages(whole: tuple[int, object], tmp_path: Path) -> None:
    count, expected = whole
    for place, way in enumerate(WAYS):
        survive(tmp_path / way, (place + 1) * count // 5, way)
        assert outcome(tmp_path / way / "run") == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_message(whole: tuple[int, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count, expected = whole
    for way in WAYS:
        for at in range(count):
            folder = tmp_path / f"{way}-{at}"
            survive(folder, at, way)
            assert outcome(folder / "run") == expected, folder.name
    with capsys.disabled():
        faults = count * len(WAYS)
        print(f"\nFlower: {count} messages, {faults} faults, {faults} survived, 0 lost")
