"""How much memory a federation took at its highest, beyond the data set."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def peak_memory(data: Path) -> int | None:
    """The highest resident memory (bytes) of this process and of its children, added up, without the pages of
    the files in `data` that they map. None where there is no /proc to tell."""
    if not (PROC / "self" / "smaps").exists():
        return None
    return sum(_peak(pid) - _mapped(pid, data) for pid in (os.getpid(), *_children()))


def _children() -> list[int]:
    tasks = (PROC / "self" / "task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def _peak(pid: int) -> int:
    """VmHWM of the process. (getrusage's maximum would count its parent's memory before the exec too.)"""
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return next(_bytes(line) for line in lines if line.startswith("VmHWM:"))


def _mapped(pid: int, data: Path) -> int:
    """Resident pages of the data set's files."""
    total, counting = 0, False
    for line in (PROC / str(pid) / "smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            total += _bytes(line) if counting else 0
        elif "-" in line.split(maxsplit=1)[0]:  # the head of a mapping: addresses, rights, …, the file
            counting = f"{data}{os.sep}" in line
    return total


def _bytes(line: str) -> int:
    """
    >>> _bytes("VmHWM:	   1200 kB")
    1228800
    """
    return int(line.split()[1]) * 1024
