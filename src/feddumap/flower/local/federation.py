"""A federation on this machine: a SuperLink and SuperNodes with TLS and node authentication, and a run.

The server is the SuperLink, a device is a SuperNode. Their apps run in processes of their own: forks of one
process, `apps`, or where Flower lacks what that needs, processes of its `flower-superexec`. All files that
Flower writes are in the project's folder.

Other users of the machine can connect to the ports of these processes, and are refused there: nodes sign
their requests, what runs the apps has a secret, and the control interface requires a token. Every server
proves who it is by the federation's certificate, so that nobody else can take its port and its place.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tomli_w

from feddumap.errors import FeddumapError
from feddumap.flower.local import access
from feddumap.flower.local import project as projects
from feddumap.flower.local.certificates import private
from feddumap.flower.local.control import CommandControl, Control, Outcome, direct_control
from feddumap.flower.local.programs import DIRECT, HOST, environment, free_ports, last_words, program
from feddumap.flower.local.project import CONNECTION, Project
from feddumap.system.atomic_files import write_text
from feddumap.system.children import Supervisor

SERVER = ("superlink", "apps")
SEPARATOR = "--"  # between the arguments of several SuperExecs, for `feddumap.flower.local.prefork`
LOG = "--log"  # before the log of one of them
START = 90.0  # seconds for the SuperLink to listen


class Federation:
    """The processes of a federation, by name: superlink, node-0, node-1 and so on, apps, and run."""

    def __init__(
        self,
        project: Project,
        processes: Supervisor,
        lasting: bool = False,
        shared_machine: bool = False,
    ) -> None:
        """With `lasting` the SuperLink has a database, and knows its nodes and runs when it is restarted;
        requests take longer then. With `shared_machine` it may be open to other users of this machine, if
        Flower lacks what closing it needs."""
        self.project = project
        self._shared_machine = shared_machine
        self._lasting = lasting
        self._ports: dict[int, int] = {}
        self.missing: str | None = None
        """The part of Flower that is missing for direct control and forked apps."""
        self.processes = processes
        self.port = free_ports(1)[0]
        self.address = f"{HOST}:{self.port}"
        self.home = project.home / "up"
        if self.home.exists():
            shutil.rmtree(self.home)
        for folder in (project.home, project.path / "logs", self.home):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)
        private(self.home / "node.secret", secrets.token_bytes(32))
        self._token = secrets.token_hex(32)
        private(self.home / "control.token", self._token.encode())
        projects.connect(self.home / "flwr", self.address, project.keys / "ca.crt", self._token)

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        from feddumap.flower import internals  # takes seconds to import

        self.missing, keys = internals.MISSING, self.project.keys
        command: list[object] = ["python", "-m", "feddumap.flower.local.superlink"]
        command += ["--control-token-file", self.home / "control.token"]
        if self.missing is not None:
            if not self._shared_machine:
                access.check_alone(self.missing)
            command = ["flower-superlink"]
        command += ["--host", HOST, "--port", self.port]
        command += ["--enable-supernode-auth"]
        command += ["--database", self.home / "superlink.db"] if self._lasting else []
        command += ["--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt"]
        command += ["--ssl-keyfile", keys / "server.key", "--isolation", "process"]
        self.start("superlink", [*command, "--superexec-auth-secret-file", keys / "superexec.secret"])
        self._wait_for_superlink()
        if self.missing is None:
            access.check_closed(self.address, keys / "ca.crt")

    def register(self, nodes: Sequence[int]) -> None:
        """Tell the SuperLink the public keys of nodes."""
        with self._control() as control:
            for node in nodes:
                control.register(self.project.keys / f"node-{node}.pub")

    def start_nodes(self, nodes: Sequence[int]) -> None:
        """Start the SuperNodes of devices."""
        keys, secret = self.project.keys, self.home / "node.secret"
        for node, port in zip(nodes, free_ports(len(nodes)), strict=True):
            command: list[object] = ["flower-supernode", "--superlink", self.address, "--host", HOST]
            command += ["--port", port, "--isolation", "process", "--superexec-auth-secret-file", secret]
            command += ["--root-certificates", keys / "ca.crt", "--ssl-ca-certfile", keys / "ca.crt"]
            command += ["--ssl-certfile", keys / "server.crt", "--ssl-keyfile", keys / "server.key"]
            command += ["--auth-supernode-private-key", keys / f"node-{node}"]
            chosen = self.home / f"node-{node}.toml"
            state = str(self.project.home / "state")  # kept, as a resumed run needs its devices' state
            config = self.project.config()
            # whoever starts these devices owns them, and has named the code to run
            own_code = ":" in config.method.name or ":" in config.model.name
            settings = {"partition-id": node, "state": state, "allow-modules": own_code}
            write_text(chosen, tomli_w.dumps(settings))
            self.start(f"node-{node}", [*command, "--node-config", chosen])
            self._ports[node] = port

    def start_apps(self, nodes: Sequence[int]) -> None:
        """Start what runs the apps of the server and of devices; a device's exits with its SuperNode."""
        keys, secret = self.project.keys, "--superexec-auth-secret-file"
        trusted: list[object] = ["--root-certificates", keys / "ca.crt", "--runtime-api-address"]
        arguments = {"apps": [*trusted, self.address, secret, keys / "superexec.secret"]}
        for node in nodes:
            device = [*trusted, f"{HOST}:{self._ports[node]}", secret, self.home / "node.secret"]
            device += ["--parent-pid", self.processes.pids[f"node-{node}"]]
            arguments[f"node-{node}-apps"] = device
        if self.missing is None:
            for node in nodes:  # a device's app writes to the log of its SuperNode
                arguments[f"node-{node}-apps"] += [LOG, self.processes.log(f"node-{node}")]
            joined = [part for each in arguments.values() for part in (SEPARATOR, *each)][1:]
            self.start("apps", ["python", "-m", "feddumap.flower.local.prefork", *joined])
        else:
            for name, each in arguments.items():
                self.start(name, ["flower-superexec", *each])

    def start_run(self, name: str = "run", **settings: str) -> None:
        """Start the run, with these settings in place of the project's. The process of that name exits when
        the run ends, and its log is the server app's."""
        chosen = self.home / f"{name}.toml"
        write_text(chosen, tomli_w.dumps(projects.settings(self.project) | settings))
        command = ["flwr", "run", self.project.path, CONNECTION, "--run-config", chosen, "--stream"]
        self.start(name, command, home="flwr")

    def outcome(self) -> Outcome:
        """How the only run ended."""
        with self._control() as control:
            return control.outcome()

    def last_words(self, name: str) -> str:
        """The reason that a process gave for its exit, or the last line of its log."""
        return last_words(self.processes.log(name))

    def died(self, name: str) -> FeddumapError:
        """The error about a process that should not have exited."""
        said, log = self.last_words(name), self.processes.log(name)
        return FeddumapError(f"{name} exited unexpectedly: {said} (more in {log})")

    def start(self, name: str, command: Sequence[object], home: str = "") -> None:
        """Start one of Flower's programs, with a FLWR_HOME of its own or that of another."""
        self.processes.start(name, program(command), environment(self.home / (home or name)))

    @contextmanager
    def _control(self) -> Iterator[Control]:
        if self.missing is not None:
            yield CommandControl(self._flwr, CONNECTION)
            return
        with direct_control(self.address, self.project.keys / "ca.crt", DIRECT, self._token) as control:
            yield control

    def _flwr(self, *arguments: object) -> str:
        """Run the command `flwr` to its end; returns what it printed."""
        self.start("flwr", ["flwr", *arguments], home="flwr")
        code, log = self.processes.wait("flwr"), self.processes.log("flwr")
        if code:
            command = " ".join(map(str, arguments))
            raise FeddumapError(f"`flwr {command}` failed: {self.last_words('flwr')} (more in {log})")
        return log.read_text(encoding="utf-8", errors="replace")

    def _wait_for_superlink(self) -> None:
        until = time.monotonic() + START
        while "superlink" not in self.processes.exited(0.1):
            try:
                socket.create_connection((HOST, self.port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > until:
                    break
        raise self.died("superlink")
