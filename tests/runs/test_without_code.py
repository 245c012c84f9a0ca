"""Runs of a user's method and network can be read where the user's code is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from feddumap import run as api
from feddumap.report.series import find_runs, group_runs
from feddumap.runs.reader import read_config
from feddumap.runs.summary import finished
from feddumap.sweep import status
from feddumap.sweep.grid import Cell
from tests.conftest import small
from tests.support.command_line import CommandLine


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture(scope="module")
def folder(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedAvg, and two that differ only in the names of their method and network."""
    made = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        api.train(small(train={"rounds": 2}), made / "fedavg")
    for seed in (777, 778):
        path = made / f"own-{seed}"
        shutil.copytree(made / "fedavg", path)
        text = (path / "config.toml").read_text()
        text = text.replace('name = "fedavg"', 'name = "nowhere:method"\nmu = 0.5')
        text = text.replace('name = "lenet"', 'name = "nowhere:net"\nwidth = 8')
        (path / "config.toml").write_text(text.replace("seed = 777", f"seed = {seed}"))
        for file in path.glob("checkpoint-*.json"):
            file.write_text(file.read_text().replace('"lenet"', '"nowhere:net"'))
        summary = json.loads((path / "summary.json").read_text())
        summary |= {"method": "nowhere:method", "model": "nowhere:net"}
        (path / "summary.json").write_text(json.dumps(summary))
    return made


@pytest.mark.slow
def test_compare_report_and_inspect(folder: Path, tmp_path: Path, run: CommandLine) -> None:
    code, printed, errors = run("compare", str(folder), "--format", "json")
    assert code == 0, errors
    assert "nowhere:method" in printed
    code, _, errors = run("report", str(folder), "--out", str(tmp_path / "page"))
    assert code == 0, errors
    assert "nowhere:net" in (tmp_path / "page" / "index.html").read_text()
    code, printed, errors = run("inspect", "run", str(folder / "own-777"), "--json")
    assert code == 0, errors
    assert json.loads(printed)["method"] == {"name": "nowhere:method", "mu": 0.5}


def test_series_and_status(folder: Path) -> None:
    found = find_runs([folder])
    series = group_runs(found)
    assert [len(each.runs) for each in series] == [1, 2]
    assert series[1].config.method.settings == {"mu": 0.5}
    config = read_config(folder / "own-777")
    cell = Cell("own-777", folder / "own-777", {}, config, 2)
    assert status.read_state(cell).status == "finished"
    assert finished(folder / "own-777")


def test_resuming_needs_the_code_and_says_so(folder: Path, run: CommandLine) -> None:
    code, _, errors = run("resume", str(folder / "own-777"), "--trust")
    assert code == 2
    assert "method 'nowhere:method' cannot be imported (No module named 'nowhere')" in errors
    assert "Traceback" not in errors
