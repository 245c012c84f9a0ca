"""docs/your-model-and-data.md, block by block, with fewer rounds."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from feddumap import run as api
from feddumap.cli import main as cli
from feddumap.runs.reader import read_records

PAGE = Path(__file__).parents[1] / "docs" / "your-model-and-data.md"
FEWER = {
    "train.rounds=20": "train.rounds=4",
    "rounds=10": "rounds=4",
    "prune_round=10": "prune_round=2",
    "prune_round=5": "prune_round=2",
    "range(150)": "range(60)",
}


def command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0, line


@pytest.fixture
def page(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the page's Python blocks define, after all blocks were run in an empty folder."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = PAGE.read_text()
    for old, new in FEWER.items():
        assert old in text
        text = text.replace(old, new)
    names: dict[str, Any] = {}
    for language, options, body in re.findall(r"```(python|sh)([^\n]*)\n(.*?)```", text, re.DOTALL):
        if language == "sh":
            for line in body.splitlines():
                command(line, monkeypatch)
        elif options:
            Path(options.partition("file=")[2]).write_text(body)
        else:
            names = {}
            exec(compile(body, PAGE.name, "exec"), names)
    return names


@pytest.mark.slow
def test_the_page(page: dict[str, Any]) -> None:
    finished = {
        path.parent.name: json.loads(path.read_text()) for path in Path("runs").glob("*/summary.json")
    }
    assert finished.keys() == {"shapes-lenet", "shapes", "cells", "lines", "cells-python"}
    assert all(summary["rounds"] == 4 for summary in finished.values())
    # easy enough to be learnt in four rounds
    assert finished["lines"]["accuracy"]["best"] > 0.6
    assert finished["cells-python"]["accuracy"]["best"] > 0.8
    # a grey image has one channel, and width = 6 reached the factory
    assert api.resume("runs/shapes").model()[0].weight.shape[1:] == (1, 5, 5)
    assert finished["shapes"]["parameters"] < 2 * 6 * 49 * 32 + 6 * 25 + 12 * 6 * 25 + 1000
    # FedDUMAP pruned filters of images' networks and hidden units of tables'
    for name, layer in (("shapes", "0"), ("cells", "fc1"), ("cells-python", "0")):
        (pruning,) = (record["pruning"] for record in read_records(Path("runs", name)) if "pruning" in record)
        assert pruning["macs"]["after"] < pruning["macs"]["before"]
        assert layer in pruning["layers"]
    # the server's data is used in most rounds
    for name in ("cells", "lines", "cells-python"):
        skipped = [record for record in read_records(Path("runs", name)) if "skipped" in record]
        assert len(skipped) < 2, name
    # each module of the standard library is a device with test lines of its own
    (last,) = read_records(Path("runs/lines"))[-1:]
    assert last["device_accuracy"]["devices"] == 13
    assert last["device_accuracy"]["worst_tenth"] <= last["device_accuracy"]["mean"] <= 1
    assert "device_mean" in Path("report/index.html").read_text()
    assert page["network"](torch.from_numpy(page["x"][:3])).shape == (3, 2)
