"""The parts of Flower that are not public: a new version that lacks one fails here, with its name."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'feddumap[flower]'")

from importlib.metadata import version

from feddumap.flower import internals
from feddumap.flower.local.control import CommandControl, Outcome

FLOWER = Path(internals.__file__).parent
PUBLIC = r"flwr\.(app|clientapp|serverapp|simulation)"


def test_this_version_of_flower_has_them_all() -> None:
    assert internals.MISSING is None, (
        f"Flower {version('flwr')} lacks what feddumap/flower/internals.py uses: {internals.MISSING}"
    )
    assert all(hasattr(internals, name) for name in internals.__all__)


@pytest.mark.parametrize(
    "module", ["flwr.supercore.control", "flwr.supercore.superexec.executor", "flwr.supernode.cli"]
)
def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        found = importlib.reload(internals).MISSING
    assert importlib.reload(internals).MISSING is None
    assert module in str(found)


def test_a_missing_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr("flwr.supercore.superexec.executor.LaunchResult")
        found = importlib.reload(internals).MISSING
    assert found == "cannot import name 'LaunchResult' from 'flwr.supercore.superexec.executor'"
    with monkeypatch.context() as patch:
        patch.delattr("flwr.supercore.superexec.run_superexec.get_executor")
        found = importlib.reload(internals).MISSING
    assert found == "run_superexec has no get_executor"
    assert importlib.reload(internals).MISSING is None


def test_they_are_imported_in_one_place() -> None:
    """Those for `flower up`, and those for secure aggregation."""
    for path in FLOWER.rglob("*.py"):
        if path not in (Path(internals.__file__), FLOWER / "secagg.py"):
            used = re.findall(r"^\s*(?:from|import) (flwr[\w.]*)", path.read_text(), re.MULTILINE)
            assert [name for name in used if not re.fullmatch(PUBLIC, name)] == [], path


@pytest.mark.parametrize(
    ("status", "details", "completed", "reason"),
    [
        ("finished:completed", "N/A", True, "completed"),
        ("finished:failed", "it  broke\nhere", False, "it broke here"),
        ("running", "N/A", False, "running"),
    ],
)
def test_an_outcome_is_read_from_the_command(status: str, details: str, completed: bool, reason: str) -> None:
    def flwr(*arguments: object) -> str:
        assert arguments == ("list", "federation", "--format", "json")
        traffic = {"inbound-bytes": 3, "outbound-bytes": 5}
        run = {"status": status, "status-details": details, "network-traffic": traffic}
        return f"Listing all runs...\n{json.dumps({'success': True, 'runs': [run]})}\n"

    found = CommandControl(flwr, "federation").outcome()
    assert found == Outcome(completed, reason, sent=5, received=3)
