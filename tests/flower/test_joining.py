"""Runs begin with the devices that are there, say who is missing and why, and admit those that come later."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.flower import DEVICES, alike, config_of

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import ConfigRecord, Error, Message, RecordDict

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.messages import MissingUpload
from feddumap.engine.rounds import broadcast_of, take_census
from feddumap.errors import FeddumapError
from feddumap.flower import membership, server, waiting
from feddumap.flower.waiting import Report
from tests.support.flower_grid import FakeGrid, Mischief

NEVER = "it has no node: it never connected"


def all_of(method: str, **sections: dict[str, Any]) -> Config:
    """Every device is chosen in every round."""
    return config_of(method, **{"train": {"rounds": 4, "cohort": DEVICES}, **sections})


def over(grid: FakeGrid, config: Config, out: Path | None = None) -> api.Run:
    run = api.start(config) if out is None else api.begin(config, out)
    run.engine = partial(server.cohort, grid)
    return run


def grid_without(tmp_path: Path, *absent: int) -> FakeGrid:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path / "state"))
    for device in absent:
        grid.node(device).connected = False
    return grid


def come(grid: FakeGrid, device: int) -> None:
    grid.node(device).connected = True


@pytest.mark.parametrize("method", ["fedavg", "feddu", "scaffold", "prunefl"])
def test_two_of_four_train_and_the_others_join(
    home: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = grid_without(tmp_path, 0, 3)
    run = over(grid, all_of(method))
    records = run.iterate()
    first = next(records)
    assert first["devices"] == [1, 2]
    assert first["lost"] == {"0": NEVER, "3": NEVER}
    assert first["bytes_down"] < 4 * first["bytes_up"]
    come(grid, 3)
    second = next(records)
    assert (second["devices"], second["lost"]) == ([1, 2, 3], {"0": NEVER})
    come(grid, 0)
    third = next(records)
    assert third["devices"] == [0, 1, 2, 3]
    assert "lost" not in third
    said = capsys.readouterr().err
    assert f"training with 2 of 4 devices (device 0, 3: {NEVER}); the others join" in said
    assert "joined late: 1 of 2 missing devices" in said
    run.close()


def test_a_method_uses_the_label_mix_of_those_it_knows(home: Path, tmp_path: Path) -> None:
    """FedDU's degrees are those of the devices in the census: of two at first, then of all."""
    grid = grid_without(tmp_path, 2, 3)
    run = over(grid, all_of("feddu"))
    records = run.iterate()
    first = next(records)
    assert first["degree_devices"] == pytest.approx(0, abs=1e-12)  # all known devices took part
    counts = [np.bincount(run.dataset.train_labels[run.split.device(k)], minlength=10) for k in range(4)]
    own = np.bincount(run.dataset.train_labels[run.split.server], minlength=10)
    assert first["degree_server"] == pytest.approx(divergence(own, counts[0] + counts[1]))
    come(grid, 2)
    come(grid, 3)
    assert next(records)["degree_server"] == pytest.approx(divergence(own, sum(counts)))  # type: ignore[arg-type]
    run.close()


def divergence(one: np.ndarray, other: np.ndarray) -> float:
    """Base-2 Jensen-Shannon, from its definition."""
    p, q = one / one.sum(), other / other.sum()
    middle = (p + q) / 2

    def information(a: np.ndarray) -> float:
        return float(sum(x * np.log2(x / m) for x, m in zip(a, middle, strict=True) if x))

    return (information(p) + information(q)) / 2


def test_below_the_share_there_is_a_sentence(home: Path, tmp_path: Path) -> None:
    sentence = (
        r"round 0: 1 of 4 devices replied as expected when asked 'census', 2 were needed "
        r"\(run.least_share = 0.5\), in 3 tries \(device 1: it has no node: it never connected; "
    )
    with pytest.raises(FeddumapError, match=sentence):
        over(grid_without(tmp_path, 1, 2, 3), all_of("fedavg")).run()


def test_a_one_shot_method_needs_everybody(home: Path, tmp_path: Path) -> None:
    config = config_of("fedkt").replace(data={"server_fraction": 0.2})
    sentence = r"asked 'census', 4 were needed \(all that were asked\), .*device 3: it has no node"
    with pytest.raises(FeddumapError, match=sentence):
        over(grid_without(tmp_path, 3), config).run()


def test_if_all_that_were_chosen_are_missing_they_are_waited_for(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("fedavg", train={"rounds": 1, "cohort": 2})
    chosen = api.train(config.replace(run={"engine": "local"})).records[0]["devices"]
    grid = grid_without(tmp_path, *chosen)
    with pytest.raises(FeddumapError, match=r"0 of 2 devices .* asked 'census', 1 were needed"):
        over(grid, config).run()
    looks = 0
    original = FakeGrid.get_node_ids

    def late(self: FakeGrid) -> Any:
        nonlocal looks
        looks += 1
        if looks > 6:
            come(grid, chosen[1])
        return original(self)

    monkeypatch.setattr(FakeGrid, "get_node_ids", late)
    (record,) = over(grid, config).run().records
    assert (record["devices"], record["lost"]) == ([chosen[1]], {str(chosen[0]): NEVER})


def test_the_census_survives_a_resume(home: Path, tmp_path: Path) -> None:
    """A device that was there before counts in the label mix though it is not there yet."""
    expected = api.train(all_of("feddu", run={"engine": "local"}))
    out = tmp_path / "run"
    first = over(grid_without(tmp_path), all_of("feddu"), out)
    next(first.iterate())
    first.close()
    grid = grid_without(tmp_path, 2)
    second = over(grid, all_of("feddu"), out)
    records = second.iterate()
    record = next(records)
    assert (record["devices"], record["lost"]) == ([0, 1, 3], {"2": NEVER})
    assert record["degree_server"] == expected.records[1]["degree_server"]
    come(grid, 2)
    assert next(records)["devices"] == [0, 1, 2, 3]
    second.close()
    (out / "census.json").write_text('{"devices": 4, "samples": []}')
    third = over(grid_without(tmp_path), all_of("feddu"), out)
    said: list[str] = []
    third._say = said.append
    assert next(third.iterate())["devices"] == [0, 1, 2, 3]
    third.close()
    assert "the census in" in said[0]


def test_a_simulation_stores_no_census(home: Path, tmp_path: Path) -> None:
    api.train(config_of("fedavg", "local"), tmp_path / "run").close()
    assert not (tmp_path / "run" / "census.json").exists()


def test_a_newcomer_that_does_not_answer_is_not_waited_for(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is taken in a later round, when it has arrived."""
    monkeypatch.setattr(membership, "HELLO_TIMEOUT", 0.2)
    grid = grid_without(tmp_path, 3)
    run = over(grid, all_of("fedavg", run={"timeout": 60.0}))
    records = run.iterate()
    next(records)
    come(grid, 3)
    original = FakeGrid.pull_messages
    asked = grid.node(3).kinds
    held: list[str] = []

    def without_its_census(self: FakeGrid, message_ids: Any) -> Any:
        """The answer stays on its way until the round is over."""
        ids = list(message_ids)
        if asked[-1:] == ["query"] and not held:
            held.extend(ids)
        return original(self, [sent for sent in ids if sent not in held])

    with monkeypatch.context() as patch:
        patch.setattr(FakeGrid, "pull_messages", without_its_census)
        record = next(records)
    assert asked.count("query") == 1
    assert record["lost"] == {"3": "it has not answered yet"}
    assert next(records)["devices"] == [0, 1, 2, 3]
    assert asked.count("query") == 1  # it was not asked twice
    run.close()


# waiting


def test_waiting_names_who_is_missing_and_why(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "FIRST_WORD", 0.0)
    run = api.start(all_of("fedavg"))
    grid = grid_without(tmp_path, 3)
    cohort = server.cohort(grid, run)
    take_census(cohort, run.state, run.config, "none")
    said = capsys.readouterr().err
    assert said.count(f"waiting for 1 of the devices (device 3: {NEVER})") == 1
    grid.node(1).connected = False
    found = list(cohort.train(broadcast_of(run.state, run.config), [1, 2]))
    assert found[0] == MissingUpload(1, "it has no node: its node disconnected")


def test_waiting_is_said_soon_then_when_it_changes_then_rarely() -> None:
    report, said = Report(0.0), []
    for now in range(300):
        missing = {2: NEVER} if now < 20 else {2: NEVER, 3: "it left"}
        if text := report.text(missing, 0, float(now)):
            said.append((now, text))
    assert [now for now, _ in said] == [5, 20, 140, 260]
    assert said[1][1] == f"waiting for 2 of the devices (device 2: {NEVER}; device 3: it left)"


# refusals, once


def refusing(reason: str) -> Mischief:
    def change(message: Message, content: RecordDict) -> RecordDict | Error | None:
        if message.metadata.message_type != "train":
            return content
        return RecordDict({"refusal": ConfigRecord({"reason": reason})})

    return change


def test_a_refusal_is_said_once_by_the_server(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = grid_without(tmp_path)
    grid.node(1).mischief = refusing("no room")
    run = over(grid, all_of("fedavg", run={"least_share": 0.5})).run()
    assert [record["lost"] for record in run.records] == [{"1": "it refused: no room"}] * 4
    assert capsys.readouterr().err.count("device 1: it refused: no room") == 1


def test_and_once_by_the_node(home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A node without the data that it is to train on; then it has them, and loses them again."""
    grid = grid_without(tmp_path)
    data = tmp_path / "own.npz"
    run = over(grid, all_of("fedavg", train={"rounds": 8, "cohort": DEVICES}))
    indices = run.split.device(1)
    images, labels = run.dataset.train_inputs[indices], run.dataset.train_labels[indices]
    grid.node(1).config["data"] = str(data)
    sentence = "feddumap, device 1: refused a request of the server: "
    with caplog.at_level(logging.WARNING, logger="flwr"):
        records = run.iterate()
        for _ in range(3):
            assert "own.npz" in next(records)["lost"]["1"]
        assert caplog.text.count(sentence) == 1
        np.savez(data, images=images, labels=labels)
        assert next(records)["devices"] == [0, 1, 2, 3]
        assert next(records)["devices"] == [0, 1, 2, 3]
        assert caplog.text.count(sentence) == 1
    assert not list(tmp_path.rglob("refusal.txt"))
    run.close()


def test_records_are_those_of_the_simulation_when_all_are_there(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = over(grid_without(tmp_path), all_of("feddu"), out)
    alike(found.run(), api.train(all_of("feddu", run={"engine": "local"})))
    found.close()
    stored = json.loads((out / "census.json").read_text())
    assert stored["samples"] == {str(k): len(found.split.device(k)) for k in range(DEVICES)}
