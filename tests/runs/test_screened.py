"""Devices that a defence left out: in records, `inspect run` and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddumap import run as api
from feddumap.attacks import hostile_devices
from feddumap.report.lines import lines
from feddumap.report.page import parts
from feddumap.report.series import find_runs, group_runs
from feddumap.runs import inspect
from tests.conftest import small


@pytest.fixture
def defended(home: object, tmp_path: Path) -> Path:
    config = small(
        data={"devices": 5},
        train={"cohort": 5, "rounds": 2},
        aggregate={"name": "multi-krum"},
        attack={"name": "scaling", "share": 0.2, "scale": 50.0},
    )
    api.train(config, tmp_path / "run").close()
    return tmp_path / "run"


def test_inspect_and_page_name_them(defended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = inspect.describe(defended)
    (found,) = value["defence"]["devices"]
    (hostile,) = hostile_devices(small(data={"devices": 5}, attack={"name": "scaling"}))
    assert (found["device"], found["uploads"], found["left_out"], found["hostile"]) == (hostile, 2, 2, True)
    inspect.show(value)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Devices that the defence (multi-krum) left out or clipped" in shown
    runs = find_runs([defended])
    series = group_runs(runs)
    page = parts.screened(series, lines(series))
    assert f'<th scope="row">{hostile}</th>' in page
    assert "is not among the 4 of 5" in page


def test_a_run_without_a_defence_has_no_section(home: object, tmp_path: Path) -> None:
    api.train(small(train={"rounds": 1}), tmp_path / "run").close()
    assert inspect.describe(tmp_path / "run")["defence"] == {"rule": "mean", "devices": []}
    series = group_runs(find_runs([tmp_path / "run"]))
    assert parts.screened(series, lines(series)) == ""
