"""Keeps processes for another one: starts them, tells how they end, and ends them all when that one is gone.

It is run as a file, in a session of its own, and needs nothing but the standard library. Every line of its
input is a process to start, {"name", "command", "env", "log"}; every line of its output says what became of
one: {"name", "pid"} when it was started, {"name", "error"} when it could not be, {"name", "code"} when it has
ended. When the input ends, because it was closed or because whoever held it was killed, it ends all of them,
whole process groups, and then itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any, NoReturn

GRACE = 6.0  # seconds between asking a process to end and killing it
SETTLE = 3.0  # seconds until what was killed is gone
TICK = 0.1
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that this one works for
    signal.signal(signal.SIGTERM, _stop)
    _adopt_orphans()
    groups: dict[int, str] = {}
    try:
        _keep(groups)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end(set(groups))


def _keep(groups: dict[int, str]) -> None:
    """Do as the input says until it ends. `groups` are the process groups, and what they are called."""
    buffer = b""
    while True:
        if select.select([0], [], [], TICK)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                return
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                _start(json.loads(line), groups)
        for pid, code in _reap():
            if pid in groups:
                _tell({"name": groups[pid], "code": code})
        for group in [group for group in groups if not _signal(group, 0)]:
            del groups[group]  # its number may be another's from now on


def _start(order: dict[str, Any], groups: dict[int, str]) -> None:
    name = order["name"]
    try:
        with open(order["log"], "ab") as log:  # noqa: PTH123 (pathlib would be a slower start)
            child = subprocess.Popen(  # noqa: S603 (the commands are our own)
                order["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=order["env"],
                start_new_session=True,
            )
    except OSError as error:
        _tell({"name": name, "error": f"{error.strerror or error}"})
        return
    groups[child.pid] = name
    child.returncode = 0  # it is waited for here, with those it leaves behind
    _tell({"name": name, "pid": child.pid})


def _tell(what: dict[str, Any]) -> None:
    data = json.dumps(what).encode() + b"\n"
    try:
        os.write(1, data)
    except BrokenPipeError:
        return  # nobody listens any more: the input has ended too, which the next look at it will show


def end(groups: set[int]) -> None:
    """End whole process groups: asked to first, killed if they do not."""
    left = {group for group in groups if _signal(group, signal.SIGTERM)}
    left = _wait(left, GRACE)
    left = {group for group in left if _signal(group, signal.SIGKILL)}
    _wait(left, SETTLE)


def _wait(groups: set[int], seconds: float) -> set[int]:
    """The groups that still have a process after this time."""
    until = time.monotonic() + seconds
    while True:
        _reap()
        groups = {group for group in groups if _signal(group, 0)}
        if not groups or time.monotonic() > until:
            return groups
        time.sleep(TICK / 2)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; false if there is no process in it any more."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS: not permitted means that only a zombie is left
        return False
    return True


def _reap() -> list[tuple[int, int]]:
    """Take leave of children and adopted orphans that have ended: their numbers and exit codes."""
    ended: list[tuple[int, int]] = []
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return ended
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    except ChildProcessError:
        return ended


def _adopt_orphans() -> None:
    """On Linux the processes that an ended child had started become children of this one, so that they do
    not stay as zombies where process 1 takes no leave of them. Elsewhere process 1 does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
