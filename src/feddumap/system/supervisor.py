"""The supervisor of `feddumap.system.children`: starts processes, and ends them when its parent exits.

It runs as a file, in a session of its own, and needs only the standard library. Each line of its input is a
process to start, {"name", "command", "env", "log"}. Each line of its output is an event: {"name", "pid"}
for a process that was started, {"name", "error"} for one that could not be, {"name", "code"} for one that has
exited. When the input ends, because the parent closed it or was killed, the supervisor ends every process
group that it started, then exits.
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

GRACE = 6.0  # seconds between SIGTERM and SIGKILL
SETTLE = 3.0  # seconds to wait after SIGKILL
TICK = 0.1
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    signal.signal(signal.SIGTERM, _exit)
    _become_subreaper()
    groups: dict[int, str] = {}
    try:
        _supervise(groups)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        terminate(set(groups))


def _supervise(groups: dict[int, str]) -> None:
    """Start what the input names until it ends. `groups` maps process groups to their names."""
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
                _report({"name": groups[pid], "code": code})
        for group in [group for group in groups if not _signal(group, 0)]:
            del groups[group]  # the system may reuse its number


def _start(request: dict[str, Any], groups: dict[int, str]) -> None:
    name = request["name"]
    try:
        with open(request["log"], "ab") as log:  # noqa: PTH123 (pathlib would be a slower start)
            child = subprocess.Popen(  # noqa: S603 (the commands are our own)
                request["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=request["env"],
                start_new_session=True,
            )
    except OSError as error:
        _report({"name": name, "error": f"{error.strerror or error}"})
        return
    groups[child.pid] = name
    child.returncode = 0  # `_reap` waits for it, and for orphans
    _report({"name": name, "pid": child.pid})


def _report(event: dict[str, Any]) -> None:
    data = json.dumps(event).encode() + b"\n"
    try:
        os.write(1, data)
    except BrokenPipeError:
        return  # the parent is gone; the next read of the input shows it


def terminate(groups: set[int]) -> None:
    """End whole process groups: SIGTERM first, SIGKILL for those that remain."""
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
    """Send a signal to a process group; false if the group has no process any more."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS: not permitted means that only a zombie is left
        return False
    return True


def _reap() -> list[tuple[int, int]]:
    """Reap exited children, adopted orphans included: their process ids and exit codes."""
    exited: list[tuple[int, int]] = []
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return exited
            exited.append((pid, os.waitstatus_to_exitcode(status)))
    except ChildProcessError:
        return exited


def _become_subreaper() -> None:
    """On Linux, adopt the orphans of exited children, so that no zombies remain where process 1 does not reap
    them, as in many containers."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
