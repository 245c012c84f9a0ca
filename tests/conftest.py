"""Fixtures: an empty home with the embedded data set, and a run small enough to do many times."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as several tests run at once; before torch is imported

import pytest
import torch
from hypothesis import settings

from feddumap.config import Config
from feddumap.data.dataset import Dataset
from feddumap.data.sources import catalog
from feddumap.methods.feddf import BUDGETS
from feddumap.system.determinism import cores

LONGEST = ("export", "directory", "every_method", "calibration", "pool", "grid", "cohort", "sources")
"""The test files that take longest, which begin first, so that no worker waits for another one at the end."""

# a busy machine is no mistake, and the same examples every time make a failure repeatable
settings.register_profile("feddumap", deadline=None, derandomize=True)
settings.load_profile("feddumap")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, for `-n auto`: federations spend much of their time waiting."""
    return cores() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def prepared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with the digits in its cache, made once."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(home))
        catalog.get("digits")
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def home(prepared_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FEDDUMAP_HOME for this test and the processes it starts."""
    monkeypatch.setenv("FEDDUMAP_HOME", str(prepared_home))
    monkeypatch.delenv("FEDDUMAP_DATA", raising=False)
    return prepared_home


@pytest.fixture
def digits(home: Path) -> Dataset:
    return catalog.get("digits")


SMALL: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "devices": 6},
    "model": {"name": "lenet"},
    "train": {"rounds": 3, "cohort": 3, "epochs": 1, "batch": 32, "lr": 0.05},
    "run": {"workers": 1},
}


both_kernels = pytest.mark.parametrize("kernels", ["c", "torch"])
"""For what is computed by the kernels in C or by torch, as `train.kernels` says."""


def small(**sections: dict[str, Any]) -> Config:
    """The small run with some keys set."""
    return Config.parse(SMALL).replace(**sections)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """No test leaves the process with other torch settings than it found."""
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.fixture
def one_thread(_threads: None) -> Iterator[None]:
    """As in a run, for what a test computes without one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def short_distillation() -> Iterator[None]:
    """FedDF's small budget, smaller still: only the number of its steps differs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUDGETS, "small", (100, 100))
        yield
