"""A cohort of single-threaded worker processes on this machine, with data and weights in shared memory.

One thread of this process per worker waits for its reply. A worker that dies closes its pipe; it is replaced
and its job is run again. So is one that hangs (`engine/watch.py`).
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from feddumap.config import Config
from feddumap.core.messages import Answer, Broadcast, Question, ServerState, Tensors, Upload
from feddumap.core.tensors import TOGETHER
from feddumap.data.partition import Split
from feddumap.device.state import StateStore
from feddumap.engine.forkserver import ForkServer, ForkServerDiedError, search_path, shared
from feddumap.engine.shared_memory import Region, RegionPool
from feddumap.engine.watch import Watch
from feddumap.engine.worker import pack_broadcast, unpack_answers, unpack_uploads
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Say, ignore
from feddumap.training.evaluation import Score, chunks

MAX_ATTEMPTS = 3
LIGHT_BATCH = 256  # devices per job of a light question
SPARE = 64  # open files besides those of workers

Value = TypeVar("Value")
Groups = dict[str, Tensors]
Job = tuple[dict[str, Any], Groups]
"""A job of a worker, and the states of its devices."""


class WorkerDiedError(Exception):
    """A worker process exited unexpectedly."""


class WorkerProcess:
    """A worker process and its pipes. Jobs refer to `regions` by index."""

    def __init__(
        self,
        fork_server: ForkServer,
        setup: dict[str, Any],
        down: Region,
        fixed: Region,
        regions: Sequence[Region],
    ) -> None:
        jobs, ours_out = os.pipe()
        ours_in, replies = os.pipe()
        self._fork_server = fork_server
        try:
            self.pid = self._fork_server.fork(
                [jobs, replies, *(region.fd for region in (down, fixed, *regions))]
            )
        except ForkServerDiedError as error:
            raise FeddumapError(
                f"cannot start a worker process ({error}), possibly out of memory: lower run.workers"
            ) from None
        finally:
            os.close(jobs)
            os.close(replies)
        self._jobs = os.fdopen(ours_out, "w", encoding="utf-8")
        self._replies = os.fdopen(ours_in, encoding="utf-8")
        self._regions = regions
        self._code: int | None = None
        self._setup: dict[str, Any] | None = setup
        self._send(setup)

    def call(self, job: dict[str, Any], states: Groups, region: Region) -> dict[str, Any]:
        """Run a job and return its reply. `region` passes the states of its devices and receives its
        results."""
        if self._setup is not None:
            self._receive()  # ready
            self._setup = None
        index = self._regions.index(region)
        self._send({**job, "region": index, "memory": region.write(states)})
        return self._receive()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._jobs.write(json.dumps(message) + "\n")
            self._jobs.flush()
        except (BrokenPipeError, ValueError):
            raise WorkerDiedError(self._exit_status()) from None

    def _receive(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line.endswith("\n"):
            raise WorkerDiedError(self._exit_status())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise FeddumapError(reply["error"])
        if "bug" in reply:
            raise RuntimeError(f"a worker failed:\n{reply['bug']}")
        return reply

    def _exit_status(self) -> str:
        if self._code is None:
            try:
                self._code = self._fork_server.wait(self.pid)
            except ForkServerDiedError:
                return "exit code unknown: the fork server exited too"
        return f"signal {-self._code}" if self._code < 0 else f"exit code {self._code}"

    def kill(self) -> None:
        if self._code is None and self._fork_server.alive:  # otherwise the process id may be reused
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill and reap the process. No thread may be waiting for its reply."""
        self.kill()
        for pipe in (self._jobs, self._replies):
            try:
                pipe.close()
            except BrokenPipeError:  # an unread job
                continue
        self._exit_status()


class Pool:
    """A cohort of `workers` processes. Results are returned in the order of the devices.

    The processes are forked by `fork_server`, which is closed with the pool, or by the shared one.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        split: Split,
        test_inputs: int,
        workers: int,
        states: StateStore,
        fork_server: ForkServer | None = None,
        say: Say = ignore,
    ) -> None:
        allow_open_files(workers)
        self._fork_server = fork_server
        self._down, self._fixed = Region(), Region()
        arrays = {name: torch.from_numpy(array) for name, array in split.to_arrays().items()}
        self._setup = {
            "config": config.model_dump(),
            "dataset": str(folder),
            "split": self._fixed.write({"split": arrays}),
            "path": search_path(),
        }
        self._spans = chunks(test_inputs)
        self._workers = workers
        self._states = states
        self._closing = False
        self._sent: tuple[Tensors, Tensors, dict[str, Any]] | None = None
        # two results per worker in progress, and those being aggregated
        self._regions = RegionPool(2 * workers + TOGETHER, reserve=workers)
        self._processes = [self._start_worker() for _ in range(workers)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="feddumap-worker")
        self._watch = Watch(say)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [process.pid for process in self._processes]

    def _start_worker(self) -> WorkerProcess:
        server = self._fork_server or shared()
        return WorkerProcess(server, self._setup, self._down, self._fixed, self._regions.all)

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload]:
        header = self._share(broadcast)
        number = broadcast.round
        jobs = (
            (
                {"verb": "train", "broadcast": header, "devices": [device]},
                {str(device): self._states.recall(device, number)},
            )
            for device in devices
        )
        for results in self._in_order(jobs, unpack_uploads):
            for upload, state in results:
                if state:
                    self._states.keep(upload.device, number, state)
                yield upload

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        header = self._share(broadcast)
        asked = {"name": question.name, "settings": dict(question.settings)}
        size = LIGHT_BATCH if question.light else 1
        batches = (list(devices[i : i + size]) for i in range(0, len(devices), size))
        jobs: Iterator[Job] = (
            ({"verb": "survey", "broadcast": header, "question": asked, "devices": batch}, {})
            for batch in batches
        )
        for answers in self._in_order(jobs, unpack_answers):
            yield from answers

    def evaluate(self, state: ServerState) -> Score:
        header = self._share(Broadcast(state.round, state.architecture, state.weights, 0.0, mask=state.mask))
        share = -(-len(self._spans) // (2 * self._workers))
        jobs: Iterator[Job] = (
            ({"verb": "evaluate", "broadcast": header, "spans": self._spans[i : i + share]}, {})
            for i in range(0, len(self._spans), share)
        )
        replies = self._in_order(
            jobs, lambda reply, _: [Score.from_json(values) for values in reply["scores"]]
        )
        return Score.total(score for scores in replies for score in scores)

    def _share(self, broadcast: Broadcast) -> dict[str, Any]:
        """Write the tensors to shared memory, unless these weights were the last ones written."""
        sent = self._sent
        if sent and sent[0] is broadcast.weights and sent[1] is broadcast.mask and not broadcast.extra:
            return {**sent[2], "round": broadcast.round, "lr": broadcast.lr}
        header = pack_broadcast(broadcast, self._down)
        self._sent = None if broadcast.extra else (broadcast.weights, broadcast.mask, header)
        return header

    def _in_order(
        self, jobs: Iterable[Job], unpack: Callable[[dict[str, Any], Groups], Value]
    ) -> Iterator[Value]:
        """Run jobs on the workers and yield results in order. At most two jobs per worker are submitted at a
        time, so memory does not grow with the number of jobs."""
        source = iter(jobs)
        waiting: deque[Future[Value]] = deque()
        for job in source:
            waiting.append(self._threads.submit(self._run, job, unpack))
            if len(waiting) >= 2 * self._workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _run(self, job: Job, unpack: Callable[[dict[str, Any], Groups], Value]) -> Value:
        region = self._regions.acquire()
        try:
            reply = self._run_with_retries(job, region)
        except BaseException:
            self._regions.release(region)
            raise
        return unpack(reply, self._regions.lend(region, reply.get("layout", [])))

    def _run_with_retries(self, job: Job, region: Region) -> dict[str, Any]:
        deaths = 0
        while True:
            process = self._idle.get()
            try:
                with self._watch.over(process, job[0]):
                    return process.call(*job, region)
            except WorkerDiedError as death:
                if self._closing:
                    raise
                process = self._replace(process)
                deaths += 1
                if deaths == MAX_ATTEMPTS:
                    raise FeddumapError(
                        f"the worker process of a {job[0]['verb']} job died {MAX_ATTEMPTS} times (last: "
                        f"{death}), possibly out of memory: lower run.workers (now {self._workers}), then "
                        "run `feddumap resume DIR`"
                    ) from None
            finally:
                self._idle.put(process)

    def _replace(self, dead: WorkerProcess) -> WorkerProcess:
        fresh = self._start_worker()
        self._processes[self._processes.index(dead)] = fresh
        dead.close()
        return fresh

    def close(self) -> None:
        """Kill the workers, even during a job."""
        self._closing = True
        self._watch.close()
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.close()
        if self._fork_server is not None:
            self._fork_server.close()
        for region in (self._down, self._fixed, self._regions):
            region.close()


def allow_open_files(workers: int) -> None:
    """Raise this process's limit of open files to what a pool needs: two pipes and two regions per worker. It
    is an error if the system does not allow so many."""
    now = len(os.listdir("/dev/fd")) + SPARE  # noqa: PTH208 (file descriptors)
    need = now + 4 * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        raise FeddumapError(
            f"run.workers = {workers} needs {need} open files, but a process may have only {hard} here: "
            f"lower run.workers to at most {max(1, (hard - now) // 4)}, or raise the limit (`ulimit -n`)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
