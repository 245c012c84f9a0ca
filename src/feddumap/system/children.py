"""Child processes that always exit with this process, even if it is killed.

`Supervisor` is for programs of others: a supervisor process starts them and ends them. `start` is for modules
of this package, which call `exit_with_parent` or read their standard input until it ends.
"""

from __future__ import annotations

import _thread
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from feddumap.errors import FeddumapError
from feddumap.system import supervisor


def start(module: str, *arguments: str, stderr: int | None = None) -> subprocess.Popen[str]:
    """Run a module of this package in a new process with one thread, which finds modules where this process
    does. Its standard input and output are pipes. Ctrl-C does not reach it: closing its input ends it."""
    return subprocess.Popen(  # noqa: S603 (our own modules)
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def exit_with_parent(grace: float = 0.0) -> None:
    """Called in a child: when its standard input ends, interrupt its main thread as Ctrl-C does, and exit
    `grace` seconds later in any case."""

    def watch() -> None:
        while os.read(0, 4096):  # sys.stdin would hold a lock that exiting needs
            pass
        if grace:
            _thread.interrupt_main()
            threading.Event().wait(grace)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Supervisor:
    """Named processes, each with a log file in a folder. Leaving the block ends them all."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(exist_ok=True)
        self._logs = logs
        self._buffer = b""
        self.pids: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._process = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-I", supervisor.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is handled by this process
        )

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a process. The log of an earlier process of this name is deleted."""
        log = self.log(name)
        log.unlink(missing_ok=True)
        self._codes.pop(name, None)
        self.pids.pop(name, None)
        request = {"name": name, "command": list(command), "env": dict(env), "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while name not in self.pids:
            self._receive(None)

    def exited(self, seconds: float = 0.0) -> Mapping[str, int]:
        """The exit codes of the processes that have exited; waits up to this long for an event."""
        self._receive(seconds)
        return self._codes

    def wait(self, name: str) -> int:
        """Wait for a process; returns its exit code, which `exited` no longer reports."""
        while name not in self._codes:
            self._receive(None)
        return self._codes.pop(name)

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def close(self) -> None:
        """End all processes, and wait until they have exited."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _receive(self, seconds: float | None) -> None:
        """Read the supervisor's events, waiting up to this long for one."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        if not select.select([pipe], [], [], seconds)[0]:
            return
        received = os.read(pipe, 1 << 16)
        if not received:
            raise FeddumapError(
                "the supervisor process exited, and with it the processes it had started: run the same "
                "command again"
            )
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))

    def _handle(self, event: Mapping[str, Any]) -> None:
        name = event["name"]
        if "error" in event:
            raise FeddumapError(f"cannot start {name}: {event['error']}")
        if "pid" in event:
            self.pids[name] = event["pid"]
        else:
            self._codes[name] = event["code"]
