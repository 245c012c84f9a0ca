"""The command line in this process."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from feddumap.cli import main as cli


@dataclass(frozen=True)
class CommandLine:
    """Calls commands; a call returns exit code, output and errors."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["feddumap", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = self.capsys.readouterr()
        code = stopped.value.code
        assert isinstance(code, int)
        return code, captured.out, captured.err
