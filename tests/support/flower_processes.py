"""What the tests of real federations share: waiting, and looking at processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 250.0  # seconds for anything here, on a busy machine
QUICK = ["train.epochs=1", "train.batch=32", "data.augment=false"]


def until(condition: Callable[[], object], what: str, seconds: float = LIMIT) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def command_lines() -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it ended while we looked
                continue
    return found


def pids(folder: Path, name: str = "") -> list[int]:
    """The processes whose command line names a federation's folder."""
    return [pid for pid, line in command_lines().items() if str(folder) in line and name in line]


def family(pid: int) -> set[int]:
    """A process, its children, theirs, and so on."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} | found
        if more == found:
            return found
        found = more


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def users_of(folder: Path) -> list[int]:
    """The processes that have a file of this folder open."""
    found = []
    for pid in command_lines():
        try:
            links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        if any(link.startswith(f"{folder}/") for link in links):
            found.append(pid)
    return found
