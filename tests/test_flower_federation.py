"""Federations of real processes on this machine: TLS, node keys, strangers, kills, and the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from typer.testing import CliRunner

from feddumap import api
from feddumap.cli import app
from feddumap.errors import FeddumapError
from feddumap.runs import read_checkpoint, read_records

pytest.importorskip("flwr", reason="needs Flower: pip install 'feddumap[flower]'")

from cryptography import x509
from flwr.cli.build import build_fab_from_disk

from feddumap.flower import keys, programs, project

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

    def newest(self) -> Path:
        return sorted((self.folder / "run").glob("checkpoint-*.json"))[-1]


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


@pytest.fixture(scope="module")
def four(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A federation of four in training: four rounds, with a pruning before the second."""
    folder = tmp_path_factory.mktemp("federations") / "four"
    project.create(folder, 4, sets=[*QUICK, "train.rounds=4", "method.prune_round=1"])
    live = Live(folder, prepared_home)
    live.up()
    yield live
    assert live.process is not None
    if live.process.poll() is None:
        live.process.terminate()
        live.process.wait(30)


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


def test_strangers_are_refused(four: Live, tmp_path: Path) -> None:
    """While the federation is up: none of them becomes a node."""
    keys.make_all(tmp_path / "own", 1)
    until(lambda: "SuperNode ID" in (text_of(four.folder / "logs" / "node-3.log")), "node 3")
    address = connection(four.folder)
    started = {}
    for name, (options, _) in STRANGERS.items():
        command = ["flower-supernode", "--superlink", address, "--max-retries", "0", "--max-wait-time", "5"]
        command += ["--port", str(programs.free_ports(1)[0]), "--isolation", "process"]
        command += [part.format(fed=four.folder, own=tmp_path / "own") for part in options]
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


def test_a_killed_server_is_reported_and_nothing_is_left(four: Live) -> None:
    assert four.process is not None
    until(lambda: four.records() >= 2 or four.process.poll() is not None, "two rounds")
    members = family(four.process.pid)
    (superlink,) = pids(four.folder, "flower-superlink")
    os.kill(superlink, signal.SIGKILL)
    code, said = four.end()
    assert code == 2, said
    assert "superlink ended before its time" in said
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


def test_up_again_goes_on_and_equals_the_simulation(four: Live, home: Path) -> None:
    """Pruned, interrupted, encrypted, with devices in processes of their own: the same bits."""
    done = four.records()
    assert 2 <= done < 4
    four.up()
    code, said = four.end()
    assert code == 0, said
    assert f"going on after {done} of 4 rounds" in text_of(four.folder / "logs" / "run.log")
    config = project.opened(four.folder).config().replace(run={"engine": "local", "workers": 1})
    run = api.train(config)
    state = read_checkpoint(four.newest()).state
    assert state.round == run.state.round == 4
    assert run.records[1]["parameters"] < run.records[0]["parameters"]
    assert state.architecture == run.state.architecture
    assert state.weights.keys() == run.state.weights.keys()
    assert all(torch.equal(tensor, run.state.weights[name]) for name, tensor in state.weights.items())
    assert [plain(each) for each in read_records(four.folder / "run")] == [
        plain(each) for each in run.records
    ]


def test_a_killed_device_is_survived_and_ctrl_c_ends_all(prepared_home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    project.create(folder, 2, sets=[*QUICK, "method.name=fedavg", "train.rounds=9", "run.timeout=15"])
    live = Live(folder, prepared_home)
    process = live.up()
    until(lambda: live.records() >= 1 or process.poll() is not None, "a round")
    (node,) = pids(folder, "node-1.toml")
    os.kill(node, signal.SIGKILL)
    until(lambda: live.records() >= 3 or process.poll() is not None, "two more rounds")
    assert process.poll() is None, process.communicate()[0]
    assert any(record.get("lost") for record in read_records(folder / "run"))
    members = family(process.pid)
    process.send_signal(signal.SIGINT)
    code, said = live.end()
    assert code == 130
    assert "node-1 ended" in said
    assert f"go on with: feddumap flower up {folder}" in said
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def connection(folder: Path) -> str:
    from feddumap.config import read_toml

    return str(
        read_toml(folder / ".flower" / "up" / "flwr" / "config.toml", "")["superlink"]["federation"][
            "address"
        ]
    )


def plain(record: dict[str, object]) -> str:
    return json.dumps({key: value for key, value in record.items() if key != "wall"}, sort_keys=True)
