"""A federation on this machine: a SuperLink and SuperNodes with TLS and node authentication, and a run.

The server is the SuperLink, a device is a SuperNode. The apps of all of them are run by one more process,
`apps`. All that Flower remembers is in a folder of the project's.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import tomli_w
from flwr.supercore.control import ControlHttpClient

from feddumap.errors import FeddumapError
from feddumap.flower.local import control
from feddumap.flower.local import project as projects
from feddumap.flower.local.certificates import private
from feddumap.flower.local.processes import Processes
from feddumap.flower.local.programs import DIRECT, HOST, environment, free_ports, program
from feddumap.flower.local.project import CONNECTION, Project
from feddumap.system.atomic_files import write_text

SERVER = ("superlink", "apps")
SEPARATOR = "--"  # between the arguments of several, for `feddumap.flower.local.prefork`
START = 90.0  # seconds for the SuperLink to listen


class Federation:
    """The processes of a federation, by name: superlink, node-0, node-1 and so on, apps, and run."""

    def __init__(self, project: Project, processes: Processes, lasting: bool = False) -> None:
        """With `lasting` the SuperLink has a database, and finds its nodes and runs again when it is started
        again; requests take it longer then."""
        self.project = project
        self._lasting = lasting
        self._ports: dict[int, int] = {}
        self.processes = processes
        self.port = free_ports(1)[0]
        self.address = f"{HOST}:{self.port}"
        self.home = project.home / "up"
        if self.home.exists():
            shutil.rmtree(self.home)
        self.home.mkdir(parents=True)
        private(self.home / "node.secret", secrets.token_bytes(32))

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        keys = self.project.keys
        projects.connect(self.home / "flwr", self.address, keys / "ca.crt")
        command: list[object] = ["flower-superlink", "--host", HOST, "--port", self.port]
        command += ["--enable-supernode-auth"]
        command += ["--database", self.home / "superlink.db"] if self._lasting else []
        command += ["--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt"]
        command += ["--ssl-keyfile", keys / "server.key", "--isolation", "process"]
        self.start("superlink", [*command, "--superexec-auth-secret-file", keys / "superexec.secret"])
        self._wait_for_superlink()

    def register(self, nodes: Sequence[int]) -> None:
        """Tell the SuperLink the public keys of nodes."""
        with self._control() as client:
            for node in nodes:
                control.register(client, self.project.keys / f"node-{node}.pub")

    def start_nodes(self, nodes: Sequence[int]) -> None:
        """Start the SuperNodes of devices."""
        keys, secret = self.project.keys, self.home / "node.secret"
        for node, port in zip(nodes, free_ports(len(nodes)), strict=True):
            command: list[object] = ["flower-supernode", "--superlink", self.address, "--host", HOST]
            command += ["--port", port, "--isolation", "process", "--superexec-auth-secret-file", secret]
            command += ["--root-certificates", keys / "ca.crt"]
            command += ["--auth-supernode-private-key", keys / f"node-{node}"]
            chosen = self.home / f"node-{node}.toml"
            state = str(self.project.home / "state")  # a run that goes on needs what its devices kept
            write_text(chosen, tomli_w.dumps({"partition-id": node, "state": state}))
            self.start(f"node-{node}", [*command, "--node-config", chosen])
            self._ports[node] = port

    def start_apps(self, nodes: Sequence[int]) -> None:
        """Start the process that has apps run: the server's, and those of devices, which end with their
        SuperNodes."""
        keys, secret = self.project.keys, "--superexec-auth-secret-file"
        command: list[object] = ["python", "-m", "feddumap.flower.local.prefork"]
        command += ["--runtime-api-address", self.address, secret, keys / "superexec.secret"]
        command += ["--root-certificates", keys / "ca.crt"]
        for node in nodes:
            command += [SEPARATOR, "--runtime-api-address", f"{HOST}:{self._ports[node]}", "--insecure"]
            command += [secret, self.home / "node.secret"]
            command += ["--parent-pid", self.processes.pids[f"node-{node}"]]
        self.start("apps", command)

    def start_run(self, name: str = "run", **settings: str) -> None:
        """Start the run, with other settings than the project's if there are any. The process of that name
        ends when it does, and its log is the server app's."""
        chosen = self.home / f"{name}.toml"
        write_text(chosen, tomli_w.dumps(projects.settings(self.project) | settings))
        command = ["flwr", "run", self.project.path, CONNECTION, "--run-config", chosen, "--stream"]
        self.start(name, command, home="flwr")

    def outcome(self) -> control.Outcome:
        """How the only run ended."""
        with self._control() as client:
            return control.outcome(client)

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
