"""`run.engine = "ray"`: Flower's own simulation gives the same run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("flwr", reason="needs the extra ray")
pytest.importorskip("ray", reason="needs the extra ray")

from feddumap import run as api
from feddumap.cli import main as cli
from feddumap.config import Config
from feddumap.engine.registry import get_engine
from feddumap.runs.reader import read_config, read_records
from tests.support.flower import alike, config_of

pytestmark = pytest.mark.slow

FEW = {"rounds": 4, "cohort": 2}


def in_the_pool(method: str) -> api.Run:
    return api.train(config_of(method, "local", train=FEW, run={"workers": 2}))


def over_ray(method: str, rounds: int = 4) -> Config:
    return config_of(method, "ray", train={**FEW, "rounds": rounds}, run={"timeout": 120.0, "workers": 1})


@pytest.mark.parametrize("method", ["feddumap", "prunefl"])
def test_ray_and_the_pool_agree_bit_for_bit(home: Path, method: str) -> None:
    """Four devices, four rounds, with prunings between."""
    run = api.start(over_ray(method))
    run.engine = get_engine("ray")
    alike(run.run(), in_the_pool(method))
    pruned = [record["round"] for record in run.records if "pruning" in record]
    assert pruned == {"feddumap": [2], "prunefl": [0, 2]}[method]


def test_the_command_line_stops_and_goes_on_with_ray(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FedDA, in two goes."""
    out, file = tmp_path / "run", tmp_path / "c.toml"
    file.write_text(tomli_w.dumps(over_ray("fedda", rounds=2).to_toml()))

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["feddumap", *arguments])
        with pytest.raises(SystemExit, match="0"):
            cli.main()

    call("train", str(file), "--out", str(out))
    assert read_config(out).run.engine == "ray"
    assert len(read_records(out)) == 2
    call("resume", str(out), "--rounds", "4")
    found = api.resume(out)
    found.close()
    alike(found, in_the_pool("fedda"))
    assert "rounds" in capsys.readouterr().out
