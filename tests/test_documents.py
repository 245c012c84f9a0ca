"""What the documents show is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from feddumap.cli import bench, data, flower, inspect
from feddumap.cli.main import app
from feddumap.runs.reader import read_records

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readmes_python_runs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code.replace("rounds=10", "rounds=3"), "README.md", "exec"), names)
    assert (tmp_path / "runs" / "second" / "summary.json").exists()


def test_the_guides_python_runs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks one after another, as in one program, and the whole again, which goes on."""
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "guide.md").read_text()
    section = text[text.index("## From Python") :].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    for rounds in (2, 3):
        exec(
            compile(code.replace("rounds=5", f"rounds={rounds}"), "guide.md", "exec"),
            {"__name__": "__main__"},
        )
        assert len(read_records(tmp_path / "runs" / "own")) == rounds
    assert (tmp_path / "report" / "index.html").exists()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(path: Path) -> None:
    groups = {"bench": bench.app, "data": data.app, "flower": flower.app, "inspect": inspect.app}
    for words in re.findall(
        r"feddumap ((?:[a-z]+ ?)+)", "\n".join(re.findall(r"`[^`]+`|```.*?```", path.read_text(), re.DOTALL))
    ):
        first, *rest = words.split()
        names = {command.name or command.callback.__name__ for command in app.registered_commands}
        assert first in names | set(groups), words
        if first in groups and rest:
            known = {
                command.name or command.callback.__name__ for command in groups[first].registered_commands
            }
            assert rest[0] in known, words


def test_configurations_in_documents_exist() -> None:
    for path in DOCUMENTS:
        for name in re.findall(r"configs/[\w-]+\.toml", path.read_text()):
            assert (ROOT / name).exists(), name
