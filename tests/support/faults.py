"""Faults on purpose: one operation of a run fails, in its own process, and the run goes on afterwards."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.tensors import digest
from feddumap.engine import forkserver
from feddumap.engine import pool as pool_module
from feddumap.errors import FeddumapError
from feddumap.runs.reader import read_checkpoint, read_records
from feddumap.runs.verify import Verification
from feddumap.system import atomic_files

Way = Literal["error", "kill", "short", "torn"]
"""The operation fails; the process is killed before it; half of the bytes are written, then it fails; half of
the bytes are written, then the process is killed. The last two are for writes."""

OPERATIONS = ("open", "write", "fsync", "replace", "unlink", "makedirs", "ftruncate")
FINISHED, STOPPED, BUG = 0, 3, 4  # exit codes
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def outcome(directory: Path) -> tuple[str, float, list[dict[str, Any]]]:
    """The results of a run: its last state, and the records without how long they took."""
    saved = read_checkpoint(max(directory.glob("checkpoint-*.json")))
    state = {**saved.state.weights, **{f"steps/{name}": value for name, value in saved.state.steps.items()}}
    return digest(state), saved.state.clock, [{**record, "wall": 0} for record in read_records(directory)]


@dataclass
class FaultyOs:
    """The `os` of `feddumap.system.atomic_files`, one of whose operations fails."""

    at: int = -1
    way: Way = "error"
    done: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return partial(self._call, name, real) if name in OPERATIONS else real

    def _call(self, name: str, real: Callable[..., Any], *arguments: Any, **keys: Any) -> Any:
        self.done.append(name)
        if len(self.done) - 1 != self.at:
            return real(*arguments, **keys)
        if self.way in ("short", "torn"):
            fd, data = arguments
            real(fd, data[: len(data) // 2])
        if self.way in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise FULL

    def install(self) -> None:
        vars(atomic_files)["os"] = self


@dataclass
class FaultyPipes:
    """The messages between a run and its workers, one of which fails: an error, half a message and a dead
    worker (`short`), a dead run (`kill`) or, after half a message, a dead run (`torn`)."""

    at: int = -1
    way: Way = "error"
    done: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def install(self) -> None:
        worker = pool_module.WorkerProcess
        for name in ("_send", "_receive"):
            setattr(worker, name, self._wrapped(name, getattr(worker, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(process: pool_module.WorkerProcess, *arguments: Any) -> Any:
            with self.lock:
                self.done.append(name)
                hit = len(self.done) - 1 == self.at
            if hit:
                self._fail(process, *arguments)
            return real(process, *arguments)

        return call

    def _fail(self, process: pool_module.WorkerProcess, *arguments: Any) -> None:
        if self.way in ("short", "torn") and arguments:
            text = json.dumps(arguments[0])
            process._jobs.write(text[: len(text) // 2])
            process._jobs.flush()
        if self.way in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.way == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        process.kill()


Fault = FaultyOs | FaultyPipes


def train(config: Config, out: Path, fault: Fault) -> tuple[int, list[str]]:
    """Begin or continue a run in a process of its own. Returns its exit code, negative for a signal, and the
    operations that it did."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = BUG
        try:
            os.close(reader)
            forkserver._shared = forkserver.ForkServer(forked=True) if config.run.workers > 1 else None
            fault.install()
            with api.begin(config, out) as run:
                run.run()
            code = FINISHED
        except (OSError, FeddumapError):
            code = STOPPED
        except BaseException:
            traceback.print_exc()
        finally:
            os.write(writer, "\n".join(fault.done).encode()[:60_000])
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        done = file.read().split()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), done


def survive(config: Config, out: Path, fault: Fault) -> tuple[int, Any]:
    """A run with a fault, and then without: the exit code of the first, and the results of the second."""
    code, _ = train(config, out, fault)
    with api.begin(config.replace(run={"workers": 1}), out) as run:
        run.run()
    found = Verification(out, repair=False).run()
    assert [each for each in found if each.state != "ok"] == []
    assert not list(out.rglob("*.tmp"))
    result = outcome(out)
    shutil.rmtree(out)
    return code, result
