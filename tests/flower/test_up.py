"""`feddumap flower init` and `up`: whole folders, processes that exit together, and runs that resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from zipfile import ZipFile

import numpy as np
import pytest
from typer.testing import CliRunner

from feddumap.cli.main import app
from feddumap.config import load
from feddumap.errors import FeddumapError
from feddumap.runs.reader import read_records

pytest.importorskip("flwr", reason="needs Flower: pip install 'feddumap[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk

from feddumap import run as api
from feddumap.flower import internals, server
from feddumap.flower.local import certificates, programs, project, up
from feddumap.flower.local.federation import Federation
from feddumap.system.console import plural
from tests.support.flower import alike
from tests.support.flower_grid import FakeGrid
from tests.support.flower_processes import LIMIT, QUICK, command_lines, family, pids, until

needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes in /proc")


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
            # a test run in the background of a shell inherits an ignored Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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
    assert made.config().aggregate.name == "clipped"  # which goes with every method but those of FedKT
    voting = project.new_config(2, ["method.name=fedkt"])
    assert voting.aggregate.name == "mean"
    assert project.new_config(4, ["run.secure=true"]).aggregate.name == "mean"
    private = project.new_config(4, ["privacy.clip=1.0", "privacy.noise=1.0"])
    assert (private.aggregate.name, private.method.settings["degree"]) == ("mean", "device")
    assert project.new_config(2, ["aggregate.name=trust"]).aggregate.name == "trust"
    described = tomllib.loads((made.path / "pyproject.toml").read_text())["project"]
    assert {"name", "version", "description", "license"} <= described.keys()  # else `flwr run` warns
    secret = {"server.key", "superexec.secret", "control.token", "node-0", "node-1"}
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
    monkeypatch.setattr(certificates, "make_node_key", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        project.create(tmp_path / "other", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["fed"]


def test_init_checks_the_data_and_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the start of a run does, and before there is a folder."""
    monkeypatch.chdir(tmp_path)
    for sets, message in (
        (["data.name=shapes"], f"no file or folder 'shapes' in {tmp_path}"),
        (["model.name=my_nets:small"], "model 'my_nets:small' cannot be imported"),
        (["model.weights=none.safetensors"], "model.weights = 'none.safetensors' cannot be read"),
        (["train.cohort=5"], "train.cohort = 5 is larger than data.devices = 2"),
        (["data.devices=3"], "data.devices = 3: expected the number of nodes, 2"),
    ):
        with pytest.raises(FeddumapError, match=message):
            project.create(tmp_path / "fed", 2, sets=sets)
    assert list(tmp_path.iterdir()) == []


EXPERIMENT = """\
[data]
name = "own.npz"
devices = 6
partition = "iid"
[model]
name = "mlp"
[method]
name = "feddum"
[train]
rounds = 5
cohort = 3
lr = 0.2
"""


def test_init_takes_the_configuration_of_an_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes what a federation needs and no more, so that the weights are those of the experiment."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(120, 4)), np.arange(120) % 4
    np.savez("own.npz", train_inputs=inputs, train_labels=labels, test_inputs=inputs, test_labels=labels)
    Path("experiment.toml").write_text(EXPERIMENT)
    result = CliRunner().invoke(app, ["flower", "init", "fed", "experiment.toml", "--set", "run.seed=5"])
    assert result.exit_code == 0, result.output
    made = project.opened(tmp_path / "fed")
    assert made.nodes == 6
    expected = load(Path("experiment.toml")).replace(
        data={"name": str(tmp_path / "own.npz")}, run={"engine": "flower", "seed": 5}
    )
    assert made.config() == expected
    fewer = project.new_config(4, ["train.lr=0.3"], Path("experiment.toml"))
    assert (fewer.data.devices, fewer.train.lr, fewer.model.name) == (4, 0.3, "mlp")


def test_a_folder_of_the_name_of_a_known_data_set_is_not_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()
    assert project.new_config(2).data.name == "digits"


def test_without_flower_the_commands_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    for command in ("init", "up"):
        result = CliRunner().invoke(app, ["flower", command, str(tmp_path / "fed")])
        assert "pip install 'feddumap[flower]'" in str(result.exception)


@needs_proc
def test_child_processes_exit_with_their_parent(tmp_path: Path) -> None:
    """Even if it is killed, and with the processes that they started themselves."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "from feddumap.flower.local.programs import last_words\n"
        "from feddumap.system.children import Supervisor\n"
        "with Supervisor(Path(sys.argv[1])) as processes:\n"
        "    processes.start('one', ['sh', '-c', 'sleep 1234.5 & sleep 1234.5'], dict(os.environ))\n"
        "    processes.start('two', ['sh', '-c', 'echo because; exit 3'], dict(os.environ))\n"
        "    print(processes.wait('two'), last_words(processes.log('two')), flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "logs")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "3 because\n"

    def sleeping() -> int:
        return sum(line.startswith("sleep 1234.5") for line in command_lines().values())

    until(lambda: sleeping() == 2, "the two sleeps of the first process", 20)
    process.kill()
    process.communicate()
    until(lambda: not sleeping(), "their exit", 20)


@needs_proc
@pytest.mark.slow
def test_up_survives_a_killed_device_stops_at_ctrl_c_and_resumes(prepared_home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    project.create(folder, 2, sets=[*QUICK, "method.name=fedavg", "train.rounds=24", "run.timeout=8"])
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
    assert "node-1 exited" in said
    assert f"resume with: feddumap flower up {folder}" in said
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]
    live.up()
    code, said = live.end()
    assert code == 0, said
    assert "Flower sent" in said
    records = read_records(folder / "run")
    assert [record["round"] for record in records] == list(range(24))
    assert "lost" not in records[23]
    assert records[23]["devices"] == [0, 1]


@needs_proc
@pytest.mark.slow
def test_up_with_two_of_four_devices(home: Path, tmp_path: Path) -> None:
    """It says who is missing, and trains with those that are there."""
    sets = [*QUICK, "method.name=fedavg", "train.rounds=2", "run.timeout=12", "run.least_share=0.5"]
    made = project.create(tmp_path / "four", 4, sets=sets)
    shown: list[str] = []
    trained = up.up(made, 2, show=lambda awaited, records: shown.append(awaited))
    assert pids(made.path) == []
    assert trained.summary["rounds"] == 2
    never = "it has no node: it never connected"
    waiting = f"waiting for 2 of the devices (device 2, 3: {never})"
    assert waiting in shown
    log = (made.path / "logs" / "run.log").read_text()
    assert log.count(waiting) == 1
    assert f"training with 2 of 4 devices (device 2, 3: {never})" in log
    for record in read_records(made.run):
        assert record["devices"] == [0, 1]
        assert record["lost"] == {"2": never, "3": never}


@needs_proc
@pytest.mark.slow
def test_up_works_with_flowers_own_commands(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Flower lacks an internal part: with a sentence, without any of them, to the same records."""
    monkeypatch.setattr(internals, "MISSING", "No module named 'flwr.supercore.control'")
    for name in internals.__all__:
        if name != "MISSING":
            monkeypatch.delattr(internals, name)
    sets = [*QUICK, "method.name=fedavg", "train.rounds=2", "data.server_fraction=0"]
    made = project.create(tmp_path / "two", 2, sets=sets)
    said: list[str] = []
    trained = up.up(made, 2, say=said.append, shared_machine=True)
    assert len(said) == 1
    assert "lacks an internal part" in said[0]
    assert "flwr.supercore.control" in said[0]
    assert pids(made.path) == []
    assert trained.summary["rounds"] == 2
    assert trained.traffic.sent > trained.traffic.counted_down > 0
    assert trained.traffic.received > trained.traffic.counted_up > 0
    expected = api.train(made.config().replace(run={"engine": "local"}))
    found = api.resume(made.run)
    found.close()
    alike(found, expected)


FINISHED = {
    "one-shot": (
        ["method.name=fedkt", "method.vote_epochs=1", "train.rounds=4", "data.server_fraction=0.2"],
        1,
    ),
    "target": (["method.name=fedavg", "train.rounds=4", "run.target=0.01"], 1),
}


@pytest.mark.parametrize("name", FINISHED)
def test_up_starts_nothing_for_a_finished_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One that has fewer rounds than train.rounds says, too."""
    sets, rounds = FINISHED[name]
    made = project.create(tmp_path / "two", 2, sets=[*QUICK, *sets])
    grid = FakeGrid.of(2, state=str(tmp_path / "state"))
    for device in range(2):
        key = load_ssh_public_key((made.keys / f"node-{device}.pub").read_bytes())
        grid.node(device).key = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    server.run_app(grid, project.settings(made))
    assert len(read_records(made.run)) == rounds
    monkeypatch.setattr(up, "up", lambda *_: pytest.fail("a federation was started"))
    result = CliRunner().invoke(app, ["flower", "up", str(made.path)])
    assert result.exit_code == 0, result.output
    assert f"is finished ({plural(rounds, 'round')})" in " ".join(result.output.split())


def test_whom_the_server_waits_for_is_the_last_thing_it_said(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    assert programs.awaited(log) == ""
    log.write_bytes(
        b"x" * 10**5 + b"\n\x1b[92mINFO\x1b[0m: started\nwaiting for 1 of the devices (2: late)\n\n"
    )
    assert programs.awaited(log) == "waiting for 1 of the devices (2: late)"
    log.write_text("waiting for 1 of the devices (2: late)\nround 1 of 8\n")
    assert programs.awaited(log) == ""


def test_up_fails_with_the_server_but_not_with_a_device(tmp_path: Path) -> None:
    class Fake:
        processes = SimpleNamespace(log=lambda name: "its.log")
        died = Federation.died

        def last_words(self, name: str) -> str:
            return "it said why"

    said: list[str] = []
    check = partial(up._check, cast("Federation", Fake()), lost=set(), say=said.append)
    with pytest.raises(FeddumapError, match=r"superlink exited unexpectedly: it said why \(more in its"):
        check({"superlink": -9}, begun=True)
    with pytest.raises(FeddumapError, match="node-0 exited"):
        check({"node-0": 1}, begun=False)
    check({"node-0": 1}, begun=True)
    assert said == ["node-0 exited (it said why); the run continues without it"]
