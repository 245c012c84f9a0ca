"""Notices worker processes that hang: stopped ones, and those that wait for something that never comes.

A worker that has a job and uses no processor time is named after half a minute, and killed after two minutes;
the pool then replaces it and repeats its job, which gives the same result. A worker that computes is left
alone, however long it takes. Where the system does not report processor times (no /proc), none is noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from feddumap.system.callbacks import Say

INTERVAL = 1.0  # seconds between two looks
NOTICE, LIMIT = 30.0, 120.0  # seconds without processor time until a worker is named, and killed
STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or the network",
}


class Process(Protocol):
    """What is known of a worker process."""

    pid: int

    def kill(self) -> None: ...


@dataclass
class Busy:
    """A worker that has a job: its processor time at the last look, and the seconds in which that has not
    changed. Only looks are counted, so a pause of the whole machine is none."""

    job: str
    used: int | None = None
    idle: float = 0.0
    named: bool = False


class Watch:
    """Looks at the busy workers in a thread of its own, until it is closed."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._busy: dict[Process, Busy] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feddumap-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, process: Process, job: dict[str, Any]) -> Iterator[None]:
        """Watch a worker while it does a job."""
        with self._lock:
            self._busy[process] = Busy(describe(job))
        try:
            yield
        finally:
            with self._lock:
                self._busy.pop(process, None)

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL):
            self.look()

    def look(self) -> None:
        """Look at every busy worker once."""
        with self._lock:
            for process, busy in self._busy.items():
                used, state = processor_time(process.pid)
                if used is None or used != busy.used:
                    busy.used, busy.idle, busy.named = used, 0.0, False
                    continue
                busy.idle += INTERVAL
                if busy.idle >= NOTICE and not busy.named:
                    busy.named = True
                    how = STATES.get(state, "does nothing")
                    self._say(
                        f"worker process {process.pid} ({busy.job}) {how} for {busy.idle:.0f} s: it is "
                        f"replaced after {LIMIT:.0f} s, without consequence for the result"
                    )
                if busy.idle >= LIMIT:
                    self._say(f"worker process {process.pid} ({busy.job}) hangs: it is replaced")
                    busy.idle = 0.0
                    process.kill()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


def describe(job: dict[str, Any]) -> str:
    """What a job is about.

    >>> describe({"verb": "train", "devices": [7]}), describe({"verb": "evaluate"})
    ('train, device 7', 'evaluate')
    """
    devices = job.get("devices", [])
    if len(devices) > 1:
        return f"{job['verb']}, {len(devices)} devices"
    return f"{job['verb']}, device {devices[0]}" if devices else str(job["verb"])


def processor_time(pid: int) -> tuple[int | None, str]:
    """The processor time that a process has used, in ticks, and the letter of its state; None if it is not
    known, as for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12]), fields[0]
    except (OSError, ValueError, IndexError):
        return None, ""
