"""Processes of this one's that end when it does, however that is: a keeper starts and ends them."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from feddumap.errors import FeddumapError
from feddumap.flower.local import supervisor

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
GIVEN_UP = re.compile(r"Exit Code: \d+\n(.+?)\n\s*For more information", re.DOTALL)


class Processes:
    """Named processes, each with its log in a folder. Leaving the block ends them all."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(exist_ok=True)
        self._logs = logs
        self._buffer = b""
        self.pids: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._keeper = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-I", supervisor.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, whose end is theirs
        )

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a process; what an earlier one of this name wrote to its log is gone."""
        log = self.log(name)
        log.unlink(missing_ok=True)
        self._codes.pop(name, None)
        self.pids.pop(name, None)
        order = {"name": name, "command": list(command), "env": dict(env), "log": str(log)}
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(json.dumps(order).encode() + b"\n")
        self._keeper.stdin.flush()
        while name not in self.pids:
            self._listen(None)

    def ended(self, seconds: float = 0.0) -> Mapping[str, int]:
        """The exit codes of the processes that have ended; waits this long for another one to."""
        self._listen(seconds)
        return self._codes

    def wait(self, name: str) -> int:
        """A process's exit code, when it has ended."""
        while name not in self._codes:
            self._listen(None)
        return self._codes[name]

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def last_words(self, name: str) -> str:
        """What a process said at its end, for a sentence: why Flower gave up, or else its last line."""
        text = COLOUR.sub("", self.log(name).read_text(encoding="utf-8", errors="replace"))
        given_up = GIVEN_UP.findall(text)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " ".join(given_up[-1].split()) if given_up else lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """End them all, and wait until they have."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()

    def _listen(self, seconds: float | None) -> None:
        """Take in what the keeper says within this time."""
        assert self._keeper.stdout is not None
        pipe = self._keeper.stdout.fileno()
        if not select.select([pipe], [], [], seconds)[0]:
            return
        received = os.read(pipe, 1 << 16)
        if not received:
            raise FeddumapError(
                "the process that keeps the others ended, and they with it: start them again with the same "
                "command"
            )
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            self._note(json.loads(line))

    def _note(self, said: Mapping[str, Any]) -> None:
        name = said["name"]
        if "error" in said:
            raise FeddumapError(f"cannot start {name}: {said['error']}")
        if "pid" in said:
            self.pids[name] = said["pid"]
        else:
            self._codes[name] = said["code"]
