"""Federations of real processes on this machine: TLS, node keys, strangers, kills, and the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from feddumap import api
from feddumap.cli import app
from feddumap.config import load
from feddumap.errors import FeddumapError
from feddumap.runs import read_records

pytest.importorskip("flwr", reason="needs Flower: pip install 'feddumap[flower]'")

from cryptography import x509
from flwr.cli.build import build_fab_from_disk

from feddumap.flower import keys, programs, project, up
from feddumap.flower.federation import Federation
from feddumap.flower.processes import Processes
from tests.test_flower_cohort import alike

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes in /proc")

LIMIT = 150.0  # seconds for anything here, on a busy machine
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


@dataclass
class Live:
    """A federation's folder and the command that has it up."""

    folder: Path
    home: Path
    process: subprocess.Popen[str] | None = None

    def up(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "feddumap", "flower", "up", str(self.folder), *options]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "FEDDUMAP_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.process

    def end(self) -> tuple[int, str]:
        """Its exit code and what it printed, when it has ended; nothing may be left of it then."""
        assert self.process is not None
        said, _ = self.process.communicate(timeout=LIMIT)
        assert pids(self.folder) == []
        return self.process.returncode, said

    def records(self) -> int:
        return len(read_records(self.folder / "run"))


def test_init_makes_a_folder_whole_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = project.create(tmp_path / "fed", 2, ["fl.example.org", "10.0.0.5"], ["train.rounds=3"])
    assert made.nodes == 2
    assert made.config().train.rounds == 3
    secret = {"server.key", "superexec.secret", "node-0", "node-1"}
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.keys.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == secret
    certificate = x509.load_pem_x509_certificate((made.keys / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.0.0.5"]
    with ZipFile(BytesIO(build_fab_from_disk(made.path))) as shipped:
        files = {".info/CONTENT", "pyproject.toml", *(f"federation/{name}" for name in project.APP)}
        assert set(shipped.namelist()) == files
    with pytest.raises(FeddumapError, match="exists already"):
        project.create(tmp_path / "fed", 2)
    with pytest.raises(FeddumapError, match="fedavg has no keys"):
        project.create(tmp_path / "other", 2, sets=["method.name=fedavg", "method.prune_round=2"])
    with pytest.raises(FeddumapError, match=r"--host 'https://x'"):
        project.create(tmp_path / "other", 2, ["https://x"])
    monkeypatch.setattr(keys, "make_node_key", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        project.create(tmp_path / "other", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["fed"]


def test_without_flower_the_commands_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    for command in ("init", "up"):
        result = CliRunner().invoke(app, ["flower", command, str(tmp_path / "fed")])
        assert "pip install 'feddumap[flower]'" in str(result.exception)


def test_processes_end_with_the_one_that_wanted_them(tmp_path: Path) -> None:
    """Even if that is killed, and whatever they started themselves."""
    script = tmp_path / "wants.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom feddumap.flower.processes import Processes\n"
        "with Processes(Path(sys.argv[1])) as processes:\n"
        "    processes.start('one', ['sh', '-c', 'sleep 1234.5 & sleep 1234.5'], dict(os.environ))\n"
        "    processes.start('two', ['sh', '-c', 'echo because; exit 3'], dict(os.environ))\n"
        "    print(processes.wait('two'), processes.last_words('two'), flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "logs")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "3 because\n"
    assert len([line for line in command_lines().values() if line.startswith("sleep 1234.5")]) == 2
    process.kill()
    process.communicate()
    until(lambda: "sleep 1234.5" not in " ".join(command_lines().values()), "the end of them", 20)


METHODS = {
    "feddumap": "method.prune_round=1",
    "prunefl": "method.adjust_every=2 method.first_passes=20",
    "fedda": "",
}


@dataclass
class Four:
    """Four nodes that three runs train on at the same time."""

    federation: Federation
    processes: Processes

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
        return METHODS.keys() & self.processes.ended().keys()

    def log(self, name: str) -> str:
        return text_of(self.processes.log(name))


@pytest.fixture(scope="module")
def four(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Four]:
    """A federation with TLS and node keys in training: four rounds of each method."""
    folder = tmp_path_factory.mktemp("federations") / "four"
    made = project.create(folder, 4, sets=[*QUICK, "train.rounds=4", "method.name=fedavg"])
    with pytest.MonkeyPatch.context() as patch, Processes(folder / "logs") as processes:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
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


def test_strangers_are_refused(four: Four, tmp_path: Path) -> None:
    """While the federation is up: none of them becomes a node."""
    keys.make_all(tmp_path / "own", 1)
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
            said, _ = process.communicate(timeout=60)
            assert process.returncode not in (0, None), f"{name}: {said}"
            assert "Failed to initialize the connection" in said, f"{name}: {said}"
            assert "SuperNode ID" not in said, f"{name}: {said}"
            assert STRANGERS[name][1] in said.lower(), f"{name}: {said}"
    finally:
        for process in started.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def test_a_superlink_that_is_started_again_is_gone_on_with(four: Four) -> None:
    """Its nodes and its runs find it again by themselves."""
    until(lambda: all(four.done(method) for method in METHODS) or four.ended(), "a round of each")
    assert not four.ended()
    assert min(four.done(method) for method in METHODS) < 4
    os.kill(four.processes.pids["superlink"], signal.SIGKILL)
    until(lambda: "superlink" in four.processes.ended(), "its end", 10)
    nodes = {name: pid for name, pid in four.processes.pids.items() if name.startswith("node-")}
    four.federation.start_superlink()
    until(lambda: all("Connection successful after" in four.log(name) for name in nodes), "the nodes")
    assert not four.processes.ended().keys() & nodes.keys()


def test_a_killed_server_app_resumes(four: Four) -> None:
    """Its run is started again, on the nodes that are still there."""
    (server,) = users_of(four.out("fedda"))
    done = four.done("fedda")
    os.kill(server, signal.SIGKILL)
    until(lambda: not users_of(four.out("fedda")), "its end", 10)
    four.start("fedda")
    until(lambda: "going on after" in four.log("fedda"), "its being gone on with")
    assert f"going on after {done} of 4 rounds" in four.log("fedda")


@pytest.mark.parametrize("method", METHODS)
def test_over_flower_and_in_the_pool_the_bits_are_the_same(four: Four, home: Path, method: str) -> None:
    """Pruned, interrupted, encrypted, with devices in processes of their own."""
    until((four.out(method) / "summary.json").exists, f"the end of {method}")
    sets = [f"method.name={method}", *METHODS[method].split(), "run.engine=local", "run.workers=2"]
    run = api.train(load(four.federation.project.path / "config.toml", sets))
    assert run.config.train.stack == 1
    found = api.resume(four.out(method))
    found.close()
    assert found.state.round == run.state.round == 4
    alike(found, run)
    if method == "feddumap":
        assert run.records[1]["parameters"] < run.records[0]["parameters"]


def test_up_survives_a_killed_device_ends_at_ctrl_c_and_goes_on(prepared_home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    project.create(folder, 2, sets=[*QUICK, "method.name=fedavg", "train.rounds=4", "run.timeout=8"])
    live = Live(folder, prepared_home)
    process = live.up()
    until(lambda: live.records() or process.poll() is not None, "a round")
    (node,) = pids(folder, "node-1.toml")
    os.kill(node, signal.SIGKILL)
    until(lambda: live.records() >= 2 or process.poll() is not None, "another round")
    assert process.poll() is None, process.communicate()[0]
    assert read_records(folder / "run")[1]["lost"] == {"1": "it did not answer within 8 s"}
    members = family(process.pid)
    process.send_signal(signal.SIGINT)
    code, said = live.end()
    assert code == 130
    assert "node-1 ended" in said
    assert f"go on with: feddumap flower up {folder}" in said
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]
    live.up()
    code, said = live.end()
    assert code == 0, said
    assert "Flower sent" in said
    records = read_records(folder / "run")
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    assert "lost" not in records[3]
    assert records[3]["devices"] == [0, 1]


def test_up_ends_when_the_server_does_but_not_with_a_device(tmp_path: Path) -> None:
    class Fake:
        processes = SimpleNamespace(last_words=lambda name: "it said why", log=lambda name: "its.log")
        died = Federation.died

    said: list[str] = []
    look = partial(up._look, cast("Federation", Fake()), lost=set(), say=said.append)
    with pytest.raises(FeddumapError, match=r"superlink ended before its time: it said why \(more in its"):
        look({"superlink": -9}, begun=True)
    with pytest.raises(FeddumapError, match="node-0 ended"):
        look({"node-0": 1}, begun=False)
    look({"node-0": 1}, begun=True)
    assert said == ["node-0 ended (it said why); the run goes on without it"]


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
