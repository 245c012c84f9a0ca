"""A run directory that names code: whoever did not make it must say that the code is trusted."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from feddumap import export
from feddumap import run as api
from feddumap.errors import FeddumapError
from feddumap.runs import trust
from feddumap.runs.reader import read_config
from tests.conftest import small
from tests.support.command_line import CommandLine

CODE = """
from pathlib import Path
Path("{mark}").write_text("imported")
from torch import nn
def make(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(256, classes))
"""


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def theirs(run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two rounds whose network is code in the current folder, as another user has made it: with the
    signature of another key. `imported` shows that the code was run."""
    (tmp_path / "trusted_nets.py").write_text(CODE.format(mark=tmp_path / "imported"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(tmp_path / "another"))
        api.train(small(model={"name": "trusted_nets:make"}, train={"rounds": 2}), tmp_path / "run")
    assert (tmp_path / "run" / trust.FILE).exists()
    forget(tmp_path)
    return tmp_path / "run"


def forget(folder: Path) -> None:
    from feddumap.models import registry

    (folder / "imported").unlink(missing_ok=True)
    sys.modules.pop("trusted_nets", None)
    registry._FAMILIES.pop("trusted_nets:make", None)


def test_nothing_is_imported_before_it_is_trusted(theirs: Path, run: CommandLine, tmp_path: Path) -> None:
    commands = [
        ("resume", str(theirs), "--rounds", "3"),
        ("export", str(theirs), "--to", "safetensors"),
        ("inspect", "prune", str(theirs)),
    ]
    for command in commands:
        code, _, errors = run(*command)
        assert code == 2
        assert f"model.name = 'trusted_nets:make' (found in {tmp_path / 'trusted_nets.py'})" in errors
        assert f"the current folder {tmp_path}" in errors
        assert "--trust" in errors
        assert "Traceback" not in errors
        assert not (tmp_path / "imported").exists()
    with pytest.raises(FeddumapError, match="trust=True"):
        export.write(theirs, "safetensors")
    assert run("resume", str(theirs), "--rounds", "3", "--trust")[0] == 0
    assert (tmp_path / "imported").exists()
    code, _, errors = run("resume", str(theirs), "--rounds", "4")  # trusted from now on
    assert code == 0, errors
    code, _, errors = run("export", str(theirs), "--to", "safetensors")
    assert code == 0, errors


def test_reading_imports_nothing(theirs: Path, run: CommandLine, tmp_path: Path) -> None:
    text = (theirs / "config.toml").read_text()
    (theirs / "config.toml").write_text(text.replace('name = "digits"', 'name = "trusted_nets:make"'))
    for command in (
        ("compare", str(theirs)),
        ("report", str(theirs), "--out", str(tmp_path / "page"), "--no-figures"),
        ("inspect", "run", str(theirs)),
    ):
        code, _, errors = run(*command)
        assert code == 0, errors
        assert not (tmp_path / "imported").exists()


def test_a_run_of_ones_own_needs_no_trust(run: CommandLine, tmp_path: Path, theirs: Path) -> None:
    api.train(small(model={"name": "trusted_nets:make"}, train={"rounds": 1}), tmp_path / "own")
    assert api.resume(tmp_path / "own", rounds=2).run().state.round == 2
    key = Path(os.environ["FEDDUMAP_HOME"]) / f"trust-{os.geteuid()}.key"
    assert key.stat().st_mode & 0o777 == 0o600
    # the signature is of the code, so it does not vouch for other code
    config = read_config(tmp_path / "own")
    assert trust.is_known(tmp_path / "own", trust.code_of(tmp_path / "own", config))
    text = (tmp_path / "own" / "config.toml").read_text()
    (tmp_path / "own" / "config.toml").write_text(text.replace('name = "fedavg"', 'name = "os:abort"'))
    with pytest.raises(FeddumapError, match=r"method\.name = 'os:abort'"):
        api.resume(tmp_path / "own", rounds=3)


def test_code_that_is_nowhere_is_not_found(theirs: Path, run: CommandLine, tmp_path: Path) -> None:
    forget(tmp_path)
    (tmp_path / "trusted_nets.py").unlink()
    code, _, errors = run("resume", str(theirs))
    assert code == 2
    assert "model.name = 'trusted_nets:make' (not found); modules are searched" in errors


def test_who_passes_the_names_needs_no_trust(theirs: Path, run: CommandLine) -> None:
    config = small(model={"name": "trusted_nets:make"}, train={"rounds": 2})
    with api.begin(config, theirs) as again:
        assert again.state.round == 2


def test_the_same_name_in_another_folder(
    theirs: Path, run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature is of the file too: a module of that name elsewhere is other code."""
    assert run("resume", str(theirs), "--trust")[0] == 0
    forget(tmp_path)
    (tmp_path / "other").mkdir()
    shutil.move(tmp_path / "trusted_nets.py", tmp_path / "other" / "trusted_nets.py")
    monkeypatch.chdir(tmp_path / "other")
    code, _, errors = run("resume", str(theirs))
    assert code == 2
    assert str(tmp_path / "other" / "trusted_nets.py") in errors
    assert not (tmp_path / "imported").exists()


def test_a_checkpoint_cannot_name_other_code(run: CommandLine, tmp_path: Path) -> None:
    from feddumap.runs.reader import digest

    api.train(small(train={"rounds": 1}), tmp_path / "run")
    assert not (tmp_path / "run" / trust.FILE).exists()  # a run that names no code is not signed
    for path in (tmp_path / "run").glob("checkpoint-*.json"):
        value = json.loads(path.read_text())
        value.pop("sha256")
        value["architecture"]["family"] = "os:abort"
        path.write_text(json.dumps({**value, "sha256": digest(value)}))
    code, _, errors = run("resume", str(tmp_path / "run"), "--rounds", "2")
    assert code == 2
    assert "os:abort" in errors
    with pytest.raises(FeddumapError, match=r"is of the network 'os:abort', not of model\.name = 'lenet'"):
        api.resume(tmp_path / "run", rounds=2, trust=True)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 32])
def test_a_key_that_others_can_read_or_that_is_damaged(
    theirs: Path, run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("FEDDUMAP_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    key = tmp_path / "home" / f"trust-{os.geteuid()}.key"
    key.write_bytes(content)
    key.chmod(0o644)
    code, _, errors = run("resume", str(theirs), "--trust")
    assert code == 2
    assert "delete it" in errors
    for text in ("[]", "{", '{"hmac": 3}', "[" * 2000):
        (theirs / trust.FILE).write_text(text)
        assert run("resume", str(theirs))[0] == 2
