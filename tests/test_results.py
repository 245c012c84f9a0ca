"""What docs/results.md shows is what the runs in results/runs recorded, and those are runs of its grids."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from feddumap.config import read_toml
from feddumap.runs.reader import read_config, read_records
from feddumap.runs.summary import accuracies, finished, read_summary
from feddumap.sweep.grid import combinations, name_from_values, read

RESULTS = Path(__file__).parents[1] / "results"
RUNS = sorted(path.parent for path in (RESULTS / "runs").glob("*/*/config.toml"))


@cache
def cells(grid: str) -> dict[str, dict[str, Any]]:
    """The keys of every cell of a grid by its name: those that are swept, and the common ones."""
    file = RESULTS / f"{grid}.toml"
    common = {
        f"{section}.{key}": value
        for section, keys in read_toml(file, "grid").items()
        if section != "grid"
        for key, value in keys.items()
    }
    return {name_from_values(applied): {**common, **applied} for applied, _ in combinations(read(file))}


def test_the_tables_are_those_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RESULTS)
    tables = importlib.import_module("tables")
    texts = [document.read_text() for document in tables.DOCUMENTS]
    assert all("<!-- table: " in text for text in texts)
    assert [tables.filled(text) for text in texts] == texts, "run python results/tables.py"


def test_the_page_is_about_the_runs() -> None:
    """`make results` has written the page that is kept since the last run was added."""
    recipe = (RESULTS.parent / "Makefile").read_text()
    pages = re.findall(r'\$\(REPORT\) results/(\S+) --title "(.*?)" --out results/(\S+)', recipe)
    (runs, title, folder), *_ = pages
    page = (RESULTS / folder / "index.html").read_text()
    assert f"<h1>{title}</h1>" in page
    (shown,) = re.findall(r'<p class="lead">.*? · (\d+) runs', page)
    assert int(shown) == len(list(RESULTS.glob(f"{runs}/config.toml"))), "run make results"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_runs_are_finished_and_of_their_grid(path: Path) -> None:
    assert finished(path)
    summary, stored = read_summary(path), read_config(path).model_dump()
    assert summary is not None
    for measure in ("final", "mean10", "best_smoothed"):
        assert summary["accuracy"][measure] == pytest.approx(accuracies(read_records(path))[measure])
    for dotted, value in cells(path.parent.name)[path.name].items():
        section, _, key = dotted.partition(".")
        assert stored[section][key] == value, dotted
