"""A federation on this machine: a SuperLink and SuperNodes with TLS and node authentication, and a run.

Two processes make the server: the SuperLink, and the SuperExec that runs the server's app for it. A device is
a SuperNode, which has its app run itself. All that Flower remembers is in a folder of the project's.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tomli_w
from flwr.supercore.control import ControlHttpClient

from feddumap.errors import FeddumapError
from feddumap.files import write_text
from feddumap.flower import control
from feddumap.flower import project as projects
from feddumap.flower.keys import private
from feddumap.flower.processes import Processes
from feddumap.flower.programs import DIRECT, HOST, environment, free_ports, program
from feddumap.flower.project import CONNECTION, Project
from feddumap.runs import read_records

SERVER = ("superlink", "superexec")
START = 90.0  # seconds for the SuperLink to listen

Say = Callable[[str], None]
Show = Callable[[str, list[dict[str, Any]]], None]  # of what is awaited, and of the records so far


def up(
    project: Project, nodes: int, timeout: float | None = None, say: Say = print, show: Show = lambda *_: None
) -> dict[str, Any]:
    """Carry out the project's run, or the rest of it, and return its summary. However this ends, every
    process it started ends too."""
    until = None if timeout is None else time.monotonic() + timeout
    with _alone(project), Processes(project.path / "logs") as processes:
        federation = Federation(project, processes)
        show("starting the SuperLink", [])
        federation.start_server()
        show(f"registering {nodes} devices", [])
        federation.register(range(nodes))
        for node in range(nodes):
            federation.start_node(node)
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
        show("the end", read_records(project.run))
        return federation.result()


def _look(federation: Federation, ended: Mapping[str, int], lost: set[str], begun: bool, say: Say) -> None:
    """See to processes that ended during the run: without the server, or before the first round, that is the
    end of it; without a device it goes on."""
    for name in ended:
        if name in lost:
            continue
        if name in SERVER or not begun:
            raise federation.died(name)
        number = name.rpartition("-")[2]
        lost |= {f"node-{number}", f"device-{number}"}  # neither is of use without the other
        say(f"{name} ended ({federation.processes.last_words(name)}); the run goes on without it")


class Federation:
    """The processes of a federation, by name: superlink, superexec, node-0, node-1 and so on, and run."""

    def __init__(self, project: Project, processes: Processes) -> None:
        self.project = project
        self.processes = processes
        self.port = free_ports(1)[0]
        self.address = f"{HOST}:{self.port}"
        self.home = project.home / "up"
        if self.home.exists():
            shutil.rmtree(self.home)
        self.home.mkdir(parents=True)
        private(self.home / "node.secret", secrets.token_bytes(32))

    def start_server(self) -> None:
        """Start the SuperLink and, when it listens, the process that runs the server's app."""
        keys = self.project.keys
        projects.connect(self.home / "flwr", self.address, keys / "ca.crt")
        secret = ("--superexec-auth-secret-file", keys / "superexec.secret")
        command: list[object] = [
            "flower-superlink",
            "--host",
            HOST,
            "--port",
            self.port,
            "--enable-supernode-auth",
        ]
        command += ["--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt"]
        command += ["--ssl-keyfile", keys / "server.key", "--isolation", "process", *secret]
        self.start("superlink", command)
        self._wait_for_superlink()
        trust = ("--root-certificates", keys / "ca.crt")
        self.start("superexec", ["flower-superexec", "--runtime-api-address", self.address, *trust, *secret])

    def register(self, nodes: Sequence[int]) -> None:
        """Tell the SuperLink the public keys of nodes."""
        with self._control() as client:
            for node in nodes:
                control.register(client, self.project.keys / f"node-{node}.pub")

    def start_node(self, node: int) -> None:
        """Start a device's SuperNode, and the process that has its app run, which ends when that does."""
        keys, port = self.project.keys, free_ports(1)[0]
        secret = ("--superexec-auth-secret-file", self.home / "node.secret")
        command: list[object] = ["flower-supernode", "--superlink", self.address, "--host", HOST]
        command += ["--port", port, "--root-certificates", keys / "ca.crt", "--isolation", "process", *secret]
        command += ["--auth-supernode-private-key", keys / f"node-{node}"]
        chosen = self.home / f"node-{node}.toml"
        state = str(self.project.home / "state")  # a run that goes on needs what its devices kept
        write_text(chosen, tomli_w.dumps({"partition-id": node, "state": state}))
        self.start(f"node-{node}", [*command, "--node-config", chosen])
        command = ["python", "-m", "feddumap.flower.warm", "--runtime-api-address", f"{HOST}:{port}"]
        command += ["--insecure", *secret, "--parent-pid", self.processes.pids[f"node-{node}"]]
        self.start(f"device-{node}", command)

    def start_run(self) -> None:
        """Start the run; the process of that name ends when it does, and its log is the server app's."""
        chosen = self.home / "run.toml"
        write_text(chosen, tomli_w.dumps(projects.settings(self.project)))
        command = ["flwr", "run", self.project.path, CONNECTION, "--run-config", chosen, "--stream"]
        self.start("run", command, home="flwr")

    def result(self) -> dict[str, Any]:
        """The summary of the run that has ended; if it failed, the reason is the error."""
        with self._control() as client:
            found = control.outcome(client)
        if not found.completed:
            raise FeddumapError(
                f"the run in {self.project.run} failed: {found.reason} (more in {self.processes.log('run')})"
            )
        return dict(json.loads((self.project.run / "summary.json").read_text(encoding="utf-8")))

    def died(self, name: str) -> FeddumapError:
        """The error about a process that should not have ended."""
        said, log = self.processes.last_words(name), self.processes.log(name)
        return FeddumapError(f"{name} ended before its time: {said} (more in {log})")

    def start(self, name: str, command: Sequence[object], home: str = "") -> None:
        """Start one of Flower's programs, with a home of its own or that of another."""
        self.processes.start(name, program(command), environment(self.home / (home or name)))

    def _control(self) -> AbstractContextManager[ControlHttpClient]:
        return control.control(self.address, self.project.keys / "ca.crt", DIRECT)

    def _wait_for_superlink(self) -> None:
        until = time.monotonic() + START
        while "superlink" not in self.processes.ended(0.1):
            try:
                socket.create_connection((HOST, self.port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > until:
                    break
        raise self.died("superlink")


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
