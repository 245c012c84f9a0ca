"""`run.engine = "ray"`: Flower's own simulation gives the same run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra ray")
pytest.importorskip("ray", reason="needs the extra ray")

from feddumap import api, cli
from feddumap.flower.engines import engine_of
from feddumap.runs import read_config, read_records
from tests.test_flower_cohort import alike, config_of


@pytest.mark.parametrize("method", ["feddumap", "prunefl", "fedda"])
def test_ray_and_the_pool_agree_bit_for_bit(home: Path, method: str) -> None:
    """Four devices, four rounds, with prunings where the method has them."""
    few = {"rounds": 4, "cohort": 2, "stack": 1}
    expected = api.train(config_of(method, "local", train=few, run={"workers": 2}))
    run = api.start(config_of(method, "ray", train=few, run={"timeout": 120.0, "workers": 2}))
    run.engine = engine_of("ray")
    alike(run.run(), expected)
    pruned = [record["round"] for record in run.records if "pruning" in record]
    assert pruned == {"feddumap": [2], "prunefl": [0, 2]}.get(method, [])


def test_the_command_line_stops_and_goes_on_with_ray(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
