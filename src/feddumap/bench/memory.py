"""Peak memory of a federation, without the data set."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def peak_memory(data: Path) -> int | None:
    """The sum of the peak resident memory (bytes) of this process and its children, without mapped pages of
    the files in `data`. None where there is no /proc."""
    if not (PROC / "self" / "smaps").exists():
        return None
    return sum(_peak(pid) - _mapped(pid, data) for pid in (os.getpid(), *_children()))


def _children() -> list[int]:
    tasks = (PROC / "self" / "task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def _peak(pid: int) -> int:
    """VmHWM of the process; getrusage would include the parent's memory before exec."""
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return next(_bytes(line) for line in lines if line.startswith("VmHWM:"))


def _mapped(pid: int, data: Path) -> int:
    """Resident pages of the data set's files, in bytes."""
    total, counting = 0, False
    for line in (PROC / str(pid) / "smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            total += _bytes(line) if counting else 0
        elif "-" in line.split(maxsplit=1)[0]:  # header of a mapping: addresses, permissions, …, file
            counting = f"{data}{os.sep}" in line
    return total


def _bytes(line: str) -> int:
    """
    >>> _bytes("VmHWM:	   1200 kB")
    1228800
    """
    return int(line.split()[1]) * 1024
