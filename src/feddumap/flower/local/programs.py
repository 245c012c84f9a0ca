"""Flower's programs on this machine: where they are, their environment, and why they exited."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from feddumap.errors import FeddumapError

HOST = "127.0.0.1"
DIRECT = {"NO_PROXY": f"{HOST},localhost", "no_proxy": f"{HOST},localhost"}
TAIL = 1 << 14  # bytes at the end of a log
INSTALL = "pip install 'feddumap[flower]'"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
EXIT_REASON = re.compile(r"Exit Code: \d+\n(.+?)\n\s*For more information", re.DOTALL)


def require_flower() -> None:
    """Raise an error if Flower is not installed."""
    if find_spec("flwr") is None:
        raise FeddumapError(f"Flower is not installed: {INSTALL}")


def program(command: Sequence[object]) -> list[str]:
    """A command line whose program is the one installed beside this Python, or this Python itself."""
    name, *arguments = (str(part) for part in command)
    if name == "python":
        return [sys.executable, *arguments]
    found = shutil.which(name, path=_search_path())
    if found is None:
        raise FeddumapError(f"cannot find the program {name}: {INSTALL}")
    return [found, *arguments]


def environment(home: Path) -> dict[str, str]:
    """The environment of a Flower process on this machine, with its files in `home`: no telemetry, no
    installation of dependencies, no proxy between processes."""
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        **DIRECT,
        "OMP_NUM_THREADS": "1",
        "PATH": _search_path(),
        "PYTHONUNBUFFERED": "1",
    }


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are not in use."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def last_words(log: Path) -> str:
    """Why a program exited, for a sentence: the reason that Flower printed, or the last line of the log."""
    text = COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace"))
    reasons = EXIT_REASON.findall(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(reasons[-1].split()) if reasons else lines[-1] if lines else "it printed nothing"


def awaited(log: Path) -> str:
    """Whom the server waits for, if that is the last thing it said in its log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            text = COLOUR.sub("", file.read().decode(errors="replace"))
    except OSError:  # there is no log yet
        return ""
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return last if last.startswith(("waiting for ", "training with ")) else ""


def _search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
