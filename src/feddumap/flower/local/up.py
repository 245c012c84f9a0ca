"""`feddumap flower up`: a federation on this machine for the duration of a run."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from feddumap.errors import FeddumapError
from feddumap.flower.local.federation import SERVER, Federation
from feddumap.flower.local.programs import awaited
from feddumap.flower.local.project import Project
from feddumap.runs.reader import read_records
from feddumap.system.children import Supervisor

Say = Callable[[str], None]
Show = Callable[[str, list[dict[str, Any]]], None]  # (what is awaited, records so far)


@dataclass(frozen=True)
class Traffic:
    """Bytes between the server and the devices: as counted by this project (tensors and answers), and as
    measured by Flower (whole messages)."""

    counted_down: int
    counted_up: int
    sent: int
    received: int


@dataclass(frozen=True)
class Finished:
    """The run's summary, and the traffic of the rounds that `up` trained."""

    summary: dict[str, Any]
    traffic: Traffic


def up(
    project: Project,
    nodes: int,
    timeout: float | None = None,
    say: Say = print,
    show: Show = lambda *_: None,
    shared_machine: bool = False,
) -> Finished:
    """Train the project's run, or the rest of it. All processes started for it exit when this returns, raises
    or is killed. With a version of Flower that leaves its control interface open, `shared_machine` is needed
    on a machine with other users."""
    until = None if timeout is None else time.monotonic() + timeout
    with _alone(project), Supervisor(project.path / "logs") as processes:
        before = len(read_records(project.run))
        federation = Federation(project, processes, shared_machine=shared_machine)
        show("starting the SuperLink", [])
        federation.start_superlink()
        if federation.missing is not None:
            say(
                f"Flower {version('flwr')} lacks an internal part that feddumap uses ({federation.missing}): "
                "using Flower's own commands, which take longer to start apps and accept requests from every "
                "user of this machine"
            )
        show(f"registering {nodes} devices", [])
        federation.register(range(nodes))
        federation.start_nodes(range(nodes))
        federation.start_apps(range(nodes))
        federation.start_run()
        lost: set[str] = set()
        while "run" not in (exited := processes.exited(0.5)):
            records = read_records(project.run)
            _check(federation, exited, lost, bool(records), say)
            waiting = "" if records else "waiting for the first round"
            show(awaited(processes.log("run")) or waiting, records)
            if until is not None and time.monotonic() > until:
                raise FeddumapError(
                    f"stopped after {timeout:g} seconds and {len(records)} rounds, as --timeout says: "
                    f"resume with `feddumap flower up {project.path}`"
                )
        records = read_records(project.run)
        show("", records)
        return _result(federation, records[before:])


def _check(federation: Federation, exited: Mapping[str, int], lost: set[str], begun: bool, say: Say) -> None:
    """Deal with processes that exited during the run: an error for the server's, and for any before the first
    round; without a device the run continues."""
    for name in exited:
        if name in lost or name.removesuffix("-apps") in lost:
            continue
        if name in SERVER or not begun:
            raise federation.died(name)
        lost.add(name)
        say(f"{name} exited ({federation.last_words(name)}); the run continues without it")


def _result(federation: Federation, records: Sequence[Mapping[str, Any]]) -> Finished:
    """The result of the run that has ended; an error with its reason if it failed."""
    project, found = federation.project, federation.outcome()
    if not found.completed:
        raise FeddumapError(
            f"the run in {project.run} failed: {found.reason} (more in {federation.processes.log('run')}); "
            f"when that is put right, resume with `feddumap flower up {project.path}`"
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
            raise FeddumapError(f"{project.path} is already up: wait for it to finish, or stop it") from None
        yield
    finally:
        os.close(lock)
