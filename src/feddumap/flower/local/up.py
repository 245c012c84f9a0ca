"""`feddumap flower up`: a whole federation on this machine for the length of a run."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from feddumap.errors import FeddumapError
from feddumap.flower.local.federation import SERVER, Federation
from feddumap.flower.local.processes import Processes
from feddumap.flower.local.project import Project
from feddumap.runs.directory import read_records

Say = Callable[[str], None]
Show = Callable[[str, list[dict[str, Any]]], None]  # of what is awaited, and of the records so far


@dataclass(frozen=True)
class Traffic:
    """Bytes between the server and the devices: as this project counts them, which is tensors and answers,
    and as Flower measured its messages."""

    counted_down: int
    counted_up: int
    sent: int
    received: int


@dataclass(frozen=True)
class Finished:
    """The run's summary, and the traffic of the rounds that `up` carried out."""

    summary: dict[str, Any]
    traffic: Traffic


def up(
    project: Project, nodes: int, timeout: float | None = None, say: Say = print, show: Show = lambda *_: None
) -> Finished:
    """Carry out the project's run, or the rest of it. However this ends, every process that it
    started ends too."""
    until = None if timeout is None else time.monotonic() + timeout
    with _alone(project), Processes(project.path / "logs") as processes:
        before = len(read_records(project.run))
        federation = Federation(project, processes)
        show("starting the SuperLink", [])
        federation.start_superlink()
        show(f"registering {nodes} devices", [])
        federation.register(range(nodes))
        federation.start_nodes(range(nodes))
        federation.start_apps(range(nodes))
        federation.start_run()
        lost: set[str] = set()
        while "run" not in (ended := processes.ended(0.5)):
            records = read_records(project.run)
            _look(federation, ended, lost, bool(records), say)
            show("waiting for the first round", records)
            if until is not None and time.monotonic() > until:
                raise FeddumapError(
                    f"stopped after {timeout:g} seconds and {len(records)} rounds, as --timeout says: go on "
                    f"with `feddumap flower up {project.path}`"
                )
        records = read_records(project.run)
        show("the end", records)
        return _result(federation, records[before:])


def _look(federation: Federation, ended: Mapping[str, int], lost: set[str], begun: bool, say: Say) -> None:
    """See to processes that ended during the run: without the server, or before the first round, that is the
    end of it; without a device it goes on."""
    for name in ended:
        if name in lost:
            continue
        if name in SERVER or not begun:
            raise federation.died(name)
        lost.add(name)
        say(f"{name} ended ({federation.processes.last_words(name)}); the run goes on without it")


def _result(federation: Federation, records: Sequence[Mapping[str, Any]]) -> Finished:
    """What came of the run that has ended; if it failed, the reason is the error."""
    project, found = federation.project, federation.outcome()
    if not found.completed:
        raise FeddumapError(
            f"the run in {project.run} failed: {found.reason} (more in {federation.processes.log('run')}); "
            f"go on with `feddumap flower up {project.path}`"
        )
    down, up = (sum(record[key] for record in records) for key in ("bytes_down", "bytes_up"))
    summary = json.loads((project.run / "summary.json").read_text(encoding="utf-8"))
    return Finished(summary, Traffic(down, up, found.sent, found.received))


@contextmanager
def _alone(project: Project) -> Iterator[None]:
    """Hold the project's lock."""
    project.home.mkdir(exist_ok=True)
    lock = os.open(project.home / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FeddumapError(f"{project.path} is up already: wait for it or stop it") from None
        yield
    finally:
        os.close(lock)
