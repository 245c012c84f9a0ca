"""`run.engine = "ray"`: Flower's own simulation gives the same run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra ray")
pytest.importorskip("ray", reason="needs the extra ray")

from feddumap import api, cli
from feddumap.runs import read_config, read_records
from tests.test_flower_cohort import alike, config_of


def test_ray_and_simulation_agree_bit_for_bit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line, interrupted in the middle and resumed."""
    config = config_of("scaffold", "local", train={"rounds": 3, "cohort": 2, "stack": 1})
    expected = api.train(config)
    out = tmp_path / "run"
    file = tmp_path / "c.toml"
    import tomli_w

    ray = config.replace(run={"engine": "ray", "timeout": 120.0, "workers": 2}, train={"rounds": 2})
    file.write_text(tomli_w.dumps(ray.to_toml()))
    monkeypatch.setattr(sys, "argv", ["feddumap", "train", str(file), "--out", str(out)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert read_config(out).run.engine == "ray"
    assert len(read_records(out)) == 2
    monkeypatch.setattr(sys, "argv", ["feddumap", "resume", str(out), "--rounds", "3"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    found = api.resume(out)
    alike(found, expected)
    assert "rounds" in capsys.readouterr().out
    found.close()
