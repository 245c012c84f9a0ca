"""`feddumap inspect prune`: what a pruning would remove, before it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from feddumap import run as api
from feddumap.cli.inspect import app
from feddumap.errors import FeddumapError
from feddumap.pruning import ranks, rates
from feddumap.runs.prune_preview import preview, show
from feddumap.system.callbacks import ignore
from tests.conftest import small


@pytest.fixture(autouse=True)
def _quick(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "STEPS", 6)
    monkeypatch.setattr(ranks, "IMAGES", 20)


def stopped(path: Path, method: dict[str, Any], **data: Any) -> api.Run:
    """A run that has stopped right before its pruning."""
    run = api.start(small(method={"prune_round": 1, **method}, data=data), path)
    rounds = iter(run)
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    run.close()
    return run


def pruned(path: Path) -> dict[str, Any]:
    """Go on with it: what the pruning did."""
    run = api.resume(path)
    record = next(rounds := iter(run))
    rounds.close()  # type: ignore[attr-defined]
    run.close()
    return dict(record["pruning"])


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "method",
    [
        {"name": "feddumap", "rate": "fixed", "fixed_rate": 0.6, "units": "all", "keep": ["fc1"]},
        {"name": "fedap", "rate_nodes": "server"},
        {"name": "hrank", "prune_rate": 0.3, "units": "all"},
    ],
    ids=["fixed", "server", "hrank"],
)
def test_the_preview_is_what_happens(tmp_path: Path, method: dict[str, Any]) -> None:
    stopped(tmp_path / "run", method)
    before = contents(tmp_path / "run")
    told = preview(tmp_path / "run", None, ignore)
    assert contents(tmp_path / "run") == before, "nothing is written"
    happened = pruned(tmp_path / "run")
    for key in ("rate", "threshold", "layers", "parameters", "macs"):
        assert told[key] == happened[key]
    assert any(layer["removed"] for layer in told["layers"].values())
    assert (told["round"], told["prune_round"]) == (1, 1)
    if method["name"] == "feddumap":
        assert told["left_out"] == {
            "fc1": {"filters": 120, "reason": "method.keep names fc1"},
            "fc3": {"filters": 10, "reason": "its units are the network's outputs"},
        }


def test_without_the_devices_the_rate_is_the_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path / "run", {"name": "fedap"})
    ticks: list[tuple[str, int, int]] = []
    told = preview(tmp_path / "run", None, ignore, lambda *tick: ticks.append(tick))
    finished = {(what, total) for what, done, total in ticks if done == total}
    assert finished == {("curvature on the server's data", rates.STEPS), ("feature ranks", ranks.IMAGES)}
    assert told["rate_from"] == "the server's data alone; a run averages it with those of devices"
    given = preview(tmp_path / "run", 0.9, ignore)
    assert (given["rate"], given["rate_from"]) == (0.9, "--rate")
    assert given["macs"]["after"] < told["macs"]["after"]
    show(told)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"at the rate {told['rate']:.3f} (from the server's data alone" in shown
    assert "The run prunes after 1 round." in shown
    assert "conv2" in shown
    assert told["rate"] == pruned(tmp_path / "run")["nodes"][0]["p"]


def test_a_server_without_data_needs_a_rate(tmp_path: Path) -> None:
    method = {"name": "fedap"}
    stopped(tmp_path / "run", method, server_fraction=0.0)
    with pytest.raises(FeddumapError, match=r"the server has none: give --rate"):
        preview(tmp_path / "run", None, ignore)
    result = CliRunner().invoke(app, ["prune", str(tmp_path / "run"), "--rate", "0.5", "--json"])
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["rate"] == 0.5
    assert told["macs"]["after"] < told["macs"]["before"]


def test_runs_that_prune_nothing_are_refused(tmp_path: Path) -> None:
    api.start(small(method={"name": "fedap"}), tmp_path / "new").close()
    with pytest.raises(FeddumapError, match="has no checkpoint yet"):
        preview(tmp_path / "new", None, ignore)
    api.start(small(), tmp_path / "plain").close()
    with pytest.raises(FeddumapError, match=r"method.name = .fedavg. removes no filters or units: give a"):
        preview(tmp_path / "plain", None, ignore)
