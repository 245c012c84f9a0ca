"""Data sets that code makes: module:function, and entry points of other packages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from feddumap.config import DataConfig
from feddumap.data.sources import catalog
from feddumap.errors import FeddumapError

MODULE = """
import numpy as np
from feddumap.core.messages import InputSpec
from feddumap.data.dataset import Arrays, Contents
from feddumap.data.in_memory import InMemoryDataset

def table(scale=1.0):
    x, y = scale * np.eye(8, dtype=np.float32), np.arange(8) % 2
    return InMemoryDataset(train=(x, y), test=(x, y), name="table")

def contents():
    x, y = np.zeros((8, 3), np.int64), np.arange(8) % 2
    return Contents(Arrays(x, y, x, y), ("a", "b"), "my code", InputSpec("tokens", (3,), vocabulary=5))

def wrong():
    x, y = np.zeros((8, 3), np.int64), np.arange(8)
    return Contents(Arrays(x, y, x, y), ("a", "b"), "my code", InputSpec("tokens", (3,), vocabulary=5))

def fails():
    return {}["missing"]

def nothing():
    return 3

number = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDUMAP_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "data_of_mine.py").write_text(MODULE)
    dist = tmp_path / "their_package-1.2.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.2\n")
    (dist / "entry_points.txt").write_text("[feddumap.data]\ntheirs = data_of_mine:table\n")


def test_functions_and_entry_points() -> None:
    found = catalog.get("data_of_mine:table")
    assert found.input.describe() == "numbers 8"
    assert np.array_equal(found.test_inputs, np.eye(8))
    assert catalog.get("theirs").folder == found.folder, "the same content is stored once"
    assert catalog.cache_folder("theirs") == found.folder
    tokens = catalog.get("data_of_mine:contents")
    assert (tokens.input.describe(), tokens.source) == ("tokens 3 of 5", "my code")
    assert {row.name for row in catalog.available() if row.cached} == {
        "data_of_mine:table",
        "data_of_mine:contents",
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data_of_mine:missing", "cannot be imported"),
        ("no_such_module:make", "cannot be imported"),
        ("data_of_mine:number", "is not a function"),
        ("data_of_mine:nothing", "returned a int: expected a feddumap.Dataset"),
        ("data_of_mine:fails", r"cannot be made \(.*data_of_mine.py:\d+: KeyError: 'missing'\)"),
        ("data_of_mine:wrong", "has train_labels from 0 to 7, expected 0 to 1: correct its function"),
        ("their", "unknown data set 'their': did you mean 'theirs'"),
    ],
)
def test_mistakes(name: str, message: str) -> None:
    with pytest.raises(FeddumapError, match=message) as caught:
        catalog.get(name)
    assert "\n" not in str(caught.value)


def test_keys_without_effect_are_refused() -> None:
    for name in ("data_of_mine:table", "digits"):
        with pytest.raises(FeddumapError, match=r"data.label = 'y': .* for which it has no meaning"):
            catalog.get(DataConfig(name=name, label="y"))
