"""Code of the user and of other packages: where it is found, and what is said when it cannot be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from feddumap.errors import FeddumapError
from feddumap.system import plugins

FILES = {
    "user_whole": "class A:\n    def f(): return 7\n",
    "user_divides": "def f(): pass\nx = 1 / 0\n",
    "user_syntax": "def f(:\n",
    "user_needs": "\nimport nowhere_at_all\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name, None)


def test_the_current_folder_is_searched(folder: Path) -> None:
    assert plugins.load_object("user_whole:A.f", "method")() == 7


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("user_divides:f", "user_divides.py:2: ZeroDivisionError: division by zero): fix it"),
        ("user_syntax:f", "user_syntax.py:1: SyntaxError: "),
        ("user_needs:f", "user_needs.py:2: No module named 'nowhere_at_all'): expected module:method of a "),
        ("user_whole:g", "(module 'user_whole' has no attribute 'g'): expected module:method of a module"),
        ("user_not_there:f", "(No module named 'user_not_there'): expected module:method of a module that"),
        ("user_whole:", "cannot be imported: expected module:method"),
    ],
)
def test_what_cannot_be_imported_is_one_sentence(folder: Path, name: str, sentence: str) -> None:
    with pytest.raises(FeddumapError) as error:
        plugins.load_object(name, "method")
    assert str(error.value).startswith(f"method {name!r} cannot be imported")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_the_traceback_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDUMAP_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        plugins.load_object("user_divides:f", "method")


def test_entry_points_of_two_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are listed in order and without an import; a name that two packages offer is not guessed."""
    for package, offers in {"one": "b = one:b\na = one:a", "two": "a = two:a"}.items():
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[feddumap.test]\n{offers}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = plugins.entry_points("feddumap.test")
    assert {name: plugins.origin(entry) for name, entry in found.items()} == {"a": "one 1.0", "b": "one 1.0"}
    with pytest.raises(FeddumapError, match=r"method 'a' is offered by one 1\.0 and by two 1\.0: uninstall"):
        plugins.load_entry(found["a"], "method")
    with pytest.raises(FeddumapError, match=r"method 'b' of one 1\.0 cannot be imported \(No module named"):
        plugins.load_entry(found["b"], "method")
