"""Worker processes know what a program passed as an object: they are forked from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from feddumap.cli import main as cli
from feddumap.core.tensors import digest
from feddumap.engine import forkserver
from feddumap.engine.forkserver import ForkServer, ForkServerDiedError
from feddumap.run import Run
from feddumap.system.callbacks import ignore
from tests.support import own_model

PROGRAM = """
    import os, signal, sys, threading

    import torch
    from torch import nn

    import feddumap
    from feddumap.core.tensors import digest

    class Net(nn.Module):  # nobody can import it
        def __init__(self, classes):
            super().__init__()
            self.body = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(2))
            self.head = nn.Linear(64, classes)

        def forward(self, images):
            return self.head(self.body(images).mean(1))

    out, victim = sys.argv[2] or None, sys.argv[3]
"""
NOTEBOOK = """
    class Cell:  # like a notebook's: what is printed belongs to this process and to a thread
        def __init__(self, real):
            self.real, self.pid = real, os.getpid()
        def write(self, text):
            assert os.getpid() == self.pid, "a worker prints through the notebook"
            return self.real.write(text)
        def flush(self):
            self.real.flush()

    sys.stdout = Cell(sys.stdout)
    stop = threading.Event()

    def busy():  # threads that allocate, compute and hold locks while the workers are forked
        values = torch.ones(64, 64, requires_grad=True)
        while not stop.is_set():
            (values @ values).sum().backward()
            sys.stdout.flush()

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
"""
TRAINING = """
    Net(10)(torch.randn(4, 3, 32, 32)).sum().backward()  # autograd has been used here

    def kill(run, record):
        if victim == "worker" and record.round == 0 and run.config.run.workers == 2:
            os.kill(run.pool.pids[0], signal.SIGKILL)
        if victim == "all" and record.round == 1:
            print(*run.pool.pids, run.pool._fork_server.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    class Watched(feddumap.Run):
        def _engine(self):
            self.pool = super()._engine()
            return self.pool

    for workers in sys.argv[1].split(","):
        run = Watched(
            model=lambda classes: Net(classes), devices=8, cohort=4, rounds=4, epochs=1, batch=32, lr=0.05,
            profile="general", workers=int(workers), out=out, callbacks=[kill], say=print,
        )
        list(run)
        print("result", type(run.pool).__name__, digest(run.state.weights))
"""
END = """
    stop.set()
    for thread in threads:
        thread.join()
"""


def execute(
    folder: Path, parts: Sequence[str], workers: str, out: Path | str = "", victim: str = ""
) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text("".join(map(textwrap.dedent, parts)))
    command = [sys.executable, "program.py", workers, str(out), victim]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def results(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("result")]
    return [(kind, weights) for _, kind, weights in lines]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_program_without_a_guard_and_a_notebook(home: Path, tmp_path: Path) -> None:
    """A class and a lambda of the program, two workers, one of which dies; then everything is killed, and a
    process with other threads goes on."""
    (alone, expected), (pool, same) = results(execute(tmp_path, (PROGRAM, TRAINING), "1,2", victim="worker"))
    assert (alone, pool, same) == ("LocalCohort", "Pool", expected)
    killed = execute(tmp_path, (PROGRAM, TRAINING), "2", tmp_path / "run", "all")
    assert killed.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in killed.stdout.splitlines()[-1].split()]
    assert len(pids) == 3
    last = execute(tmp_path, (PROGRAM, NOTEBOOK, TRAINING, END), "2", tmp_path / "run")
    assert results(last) == [("Pool", expected)]
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    until = time.monotonic() + 30
    while (left := [pid for pid in pids if exists(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def own(model: Any, **keys: Any) -> Run:
    given = {"devices": 6, "cohort": 3, "rounds": 2, "epochs": 1, "batch": 32, "lr": 0.05, "workers": 2}
    return Run(model=model, **{**given, "profile": "general", "say": ignore, **keys})


def test_the_same_bits_as_by_name(home: Path) -> None:
    """An importable factory has its import path as its name, and clean workers; anything else is forked."""
    named = own("tests.support.own_model:make").run()
    function = own(own_model.make)
    assert function.config == named.config
    forked = own(lambda classes: own_model.make(classes)).run()
    assert forked.config.model.name.startswith("python:")
    alone = own(lambda classes: own_model.make(classes), workers=1).run()
    assert len({digest(run.state.weights) for run in (named, forked, alone)}) == 1


def test_where_forks_cannot_train_there_is_one_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(ForkServerDiedError, match="CUDA is in use"):
        ForkServer(forked=True, tried=True)
    notes: list[str] = []
    run = own(lambda classes: own_model.make(classes), say=notes.append).run()
    assert run.finished
    assert (
        "worker processes cannot be forked here (CUDA is in use in this process): training in one process"
        in notes
    )


def test_a_fork_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "TRIAL_SECONDS", 1)
    monkeypatch.setattr("torch.set_num_threads", lambda _: time.sleep(60))
    with pytest.raises(ForkServerDiedError, match="does not answer"):
        forkserver._try_fork()

    def fail(_: int) -> None:
        raise RuntimeError("no autograd in a fork")

    monkeypatch.setattr("torch.set_num_threads", fail)
    with pytest.raises(ForkServerDiedError, match="cannot train, exit code 1"):
        forkserver._try_fork()


def test_a_forked_server_keeps_no_files_of_its_parent(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        made = ForkServer(forked=True)
        folder = Path(f"/proc/{made.pid}/fd")

        def held() -> bool:
            return str(tmp_path / "open") in {str(entry.readlink()) for entry in folder.iterdir()}

        until = time.monotonic() + 30
        while held() and time.monotonic() < until:
            time.sleep(0.01)
        assert not held()
        assert (folder / str(file.fileno())).exists()  # a library that closes its own descriptor can do so
        assert not file.closed
        made.close()


def test_the_command_line_says_where_to_go_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own(lambda classes: own_model.make(classes), out=tmp_path / "run", workers=1).run().close()
    monkeypatch.setattr(sys, "argv", ["feddumap", "resume", str(tmp_path / "run"), "--workers", "1"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "is an object of a Python program: go on from there, with feddumap.Run(model=" in " ".join(
        capsys.readouterr().err.split()
    )
