"""Federations of real processes on this machine: TLS, node keys, strangers, kills, and the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli_w

from feddumap import run as api
from feddumap.config import load
from feddumap.runs.reader import read_records

pytest.importorskip("flwr", reason="needs Flower: pip install 'feddumap[flower]'")


from feddumap.flower.local import certificates, programs, project
from feddumap.flower.local.federation import Federation
from feddumap.system.children import Supervisor
from tests.support.flower import alike
from tests.support.flower_processes import LIMIT, QUICK, pids, text_of, until, users_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes in /proc"),
]

METHODS = {
    "feddumap": "method.prune_round=1 method.rate_nodes=selected train.cohort=2",
    "prunefl": "method.adjust_every=2 method.first_passes=20",
    "fedda": "",
}


@dataclass
class Four:
    """Four nodes that three runs train on at the same time."""

    federation: Federation
    processes: Supervisor

    def out(self, method: str) -> Path:
        return self.federation.project.path / method

    def start(self, method: str) -> None:
        sets = f"method.name={method} {METHODS[method]}"
        self.federation.start_run(method, out=str(self.out(method)), sets=sets)

    def done(self, method: str) -> int:
        """Rounds so far."""
        return len(read_records(self.out(method)))

    def ended(self) -> set[str]:
        """The runs that are not followed any more, because they ended or because the SuperLink did."""
        return METHODS.keys() & self.processes.exited().keys()

    def log(self, name: str) -> str:
        return text_of(self.processes.log(name))


@pytest.fixture(scope="module")
def four(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Four]:
    """A federation with TLS and node keys in training: four rounds of each method."""
    folder = tmp_path_factory.mktemp("federations") / "four"
    # a killed SuperLink may lose a message: every device is asked again after a minute, none is left out
    patient = ["run.timeout=60", "run.least_share=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        made = project.create(folder, 4, sets=[*QUICK, *patient, "train.rounds=4", "method.name=fedavg"])
        with Supervisor(folder / "logs") as processes:
            federation = Federation(made, processes, lasting=True)
            federation.start_superlink()
            federation.register(range(4))
            federation.start_nodes(range(4))
            federation.start_apps(range(4))
            live = Four(federation, processes)
            for method in METHODS:
                live.start(method)
            yield live
    assert pids(folder) == []


STRANGERS = {
    "a node without a key": (["--root-certificates", "{fed}/keys/ca.crt"], "must be registered"),
    "a node with another key": (
        ["--root-certificates", "{fed}/keys/ca.crt", "--auth-supernode-private-key", "{own}/node-0"],
        "",
    ),
    "a client without TLS": (["--insecure"], ""),
    "a node that trusts another authority": (
        ["--root-certificates", "{own}/ca.crt", "--auth-supernode-private-key", "{fed}/keys/node-0"],
        "certificate",
    ),
}


def test_a_killed_server_app_resumes(four: Four) -> None:
    """Its run is started again, on the nodes that are still there."""
    until(lambda: all(four.done(method) for method in METHODS) or four.ended(), "a round of each")
    assert not four.ended()
    (server,) = users_of(four.out("fedda"))
    os.kill(server, signal.SIGKILL)
    until(lambda: not users_of(four.out("fedda")), "its end", 10)
    done = four.done("fedda")
    assert done < 4
    four.start("fedda")
    until(lambda: "resuming after" in four.log("fedda"), "its being gone on with")
    assert f"resuming after {done} of 4 rounds" in four.log("fedda")


def test_a_superlink_that_is_started_again_is_gone_on_with(four: Four) -> None:
    """Its nodes and its runs find it again by themselves."""
    unfinished = [method for method in METHODS if not (four.out(method) / "summary.json").exists()]
    assert unfinished
    os.kill(four.processes.pids["superlink"], signal.SIGKILL)
    until(lambda: "superlink" in four.processes.exited(), "its end", 10)
    before = {method: four.done(method) for method in unfinished}
    four.federation.start_superlink()
    until(lambda: all(four.done(method) > min(before[method], 3) for method in unfinished), "more rounds")
    assert not [name for name in four.processes.exited() if name.startswith("node-")]


def test_strangers_are_refused(four: Four, tmp_path: Path) -> None:
    """While the federation is up: none of them becomes a node."""
    certificates.make_all(tmp_path / "own", 1)
    until(lambda: "SuperNode ID" in four.log("node-3"), "node 3")
    address, folder = four.federation.address, four.federation.project.path
    started = {}
    for name, (options, _) in STRANGERS.items():
        command = ["flower-supernode", "--superlink", address, "--max-retries", "0", "--max-wait-time", "5"]
        command += ["--port", str(programs.free_ports(1)[0]), "--isolation", "process"]
        command += [part.format(fed=folder, own=tmp_path / "own") for part in options]
        started[name] = subprocess.Popen(
            programs.program(command),
            env=programs.environment(tmp_path / name.replace(" ", "-")),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        for name, process in started.items():
            said, _ = process.communicate(timeout=LIMIT)
            assert process.returncode not in (0, None), f"{name}: {said}"
            assert "Failed to initialize the connection" in said, f"{name}: {said}"
            assert "SuperNode ID" not in said, f"{name}: {said}"
            assert STRANGERS[name][1] in said.lower(), f"{name}: {said}"
    finally:
        for process in started.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize("method", METHODS)
def test_over_flower_and_in_the_pool_the_bits_are_the_same(four: Four, home: Path, method: str) -> None:
    """Pruned, interrupted, encrypted, with devices in processes of their own."""
    until((four.out(method) / "summary.json").exists, f"the end of {method}")
    sets = [f"method.name={method}", *METHODS[method].split(), "run.engine=local", "run.workers=2"]
    run = api.train(load(four.federation.project.path / "config.toml", sets))
    found = api.resume(four.out(method))
    found.close()
    assert run.config.train.kernels == found.config.train.kernels == "c"
    assert found.state.round == run.state.round == 4
    alike(found, run)
    if method == "feddumap":
        assert run.records[1]["parameters"] < run.records[0]["parameters"]


def test_a_stolen_number_is_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with the valid, registered key of device 1 says it is device 0, and is there first."""
    folder = tmp_path / "two"
    sets = [*QUICK, "method.name=fedavg", "train.rounds=3", "run.timeout=20"]
    made = project.create(folder, 2, sets=sets)
    dumps = tomli_w.dumps
    with Supervisor(folder / "logs") as processes:
        federation = Federation(made, processes)
        federation.start_superlink()
        federation.register(range(2))
        with monkeypatch.context() as patch:
            patch.setattr(tomli_w, "dumps", lambda value: dumps({**value, "partition-id": 0}))
            federation.start_nodes([1])
        until(lambda: "SuperNode ID" in text_of(processes.log("node-1")), "the thief")
        federation.start_nodes([0])
        federation.start_apps(range(2))
        federation.start_run()
        until(lambda: "run" in processes.exited(), "the run's end")
        server, thief = text_of(processes.log("run")), text_of(processes.log("node-1"))
    sentence = "it says it is device 0, but its key is device 1's"
    (line,) = [line for line in server.splitlines() if line.startswith("node ") and sentence in line]
    assert line.endswith(f"is not used: {sentence}")
    assert thief.count(f"device 0: the server does not use this node: {sentence}") == 1, thief
    records = read_records(folder / "run")
    assert [record["devices"] for record in records] == [[0]] * 3, server
    assert all(sentence in record["lost"]["1"] for record in records)
