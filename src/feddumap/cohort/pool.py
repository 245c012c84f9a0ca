"""A cohort of worker processes on this machine: one thread each, data and weights in shared memory.

Every worker is driven by one thread of this process that waits for its reply, so a worker that dies is
noticed at once (its pipe closes), replaced, and its job given to the new one.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from feddumap.cohort.desk import squads
from feddumap.cohort.region import Region
from feddumap.cohort.worker import pack_broadcast, unpack_answers, unpack_uploads
from feddumap.config import Config
from feddumap.data.partition import Split
from feddumap.device.evaluation import Score, chunks
from feddumap.errors import FeddumapError
from feddumap.memory import Memory
from feddumap.types import Answer, Broadcast, Question, ServerState, Tensors, Upload

TRIES = 3
LIGHT_STRETCH = 256  # devices that share the message of a light question

Value = TypeVar("Value")
Job = tuple[dict[str, Any], dict[str, Tensors]]
"""What a worker is told, and the memories of the devices it works for."""


class WorkerDiedError(Exception):
    """The process ended; the exit code says how."""


class Process:
    """One worker process and the pipe to it."""

    def __init__(self, setup: dict[str, Any], down: Region, fixed: Region) -> None:
        self.up = Region()
        fds = (down.fd, fixed.fd, self.up.fd)
        self._process = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-m", "feddumap.cohort.worker", *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its workers itself
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            text=True,
            encoding="utf-8",
        )
        self._setup: dict[str, Any] | None = setup
        self._send(setup)

    def call(self, job: dict[str, Any], memories: dict[str, Tensors]) -> dict[str, Any]:
        """Give a job, with the devices' memories, and wait for the reply."""
        if self._setup is not None:
            self._receive()  # ready
            self._setup = None
        self._send({**job, "memory": self.up.write(memories)})
        return self._receive()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise WorkerDiedError(self._ended()) from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise WorkerDiedError(self._ended())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise FeddumapError(reply["error"])
        if "bug" in reply:
            raise RuntimeError(f"a worker failed:\n{reply['bug']}")
        return reply

    def _ended(self) -> str:
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Reap the process; its thread must be done with it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self.up.close()


class Pool:
    """`workers` processes that train, answer and evaluate; results come back in the order asked."""

    def __init__(
        self, config: Config, folder: Path, split: Split, test_images: int, workers: int, memory: Memory
    ) -> None:
        self._down, self._fixed = Region(), Region()
        arrays = {name: torch.from_numpy(array) for name, array in split.to_arrays().items()}
        self._setup = {
            "config": config.model_dump(),
            "dataset": str(folder),
            "split": self._fixed.write({"split": arrays}),
        }
        self._spans = chunks(test_images)
        self._workers = workers
        self._memory = memory
        self._stack = max(1, config.train.stack)
        self._closing = False
        self._sent: tuple[Tensors, Tensors, dict[str, Any]] | None = None
        self._processes = [Process(self._setup, self._down, self._fixed) for _ in range(workers)]
        self._idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="feddumap-worker")

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [process._process.pid for process in self._processes]

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload]:
        header = self._share(broadcast)
        number = broadcast.round
        jobs = (
            (
                {"verb": "train", "broadcast": header, "devices": list(some)},
                {str(device): self._memory.recall(device, number) for device in some},
            )
            for some in squads(devices, self._stack)
        )
        for results in self._in_order(jobs, unpack_uploads):
            for upload, kept in results:
                if kept:
                    self._memory.keep(upload.device, number, kept)
                yield upload

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        header = self._share(broadcast)
        asked = {"name": question.name, "settings": dict(question.settings)}
        stretch = LIGHT_STRETCH if question.light else 1
        stretches = (list(devices[i : i + stretch]) for i in range(0, len(devices), stretch))
        jobs: Iterator[Job] = (
            ({"verb": "survey", "broadcast": header, "question": asked, "devices": some}, {})
            for some in stretches
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
        replies = self._in_order(jobs, lambda reply, _: [Score(*values) for values in reply["scores"]])
        return Score.total(score for scores in replies for score in scores)

    def _share(self, broadcast: Broadcast) -> dict[str, Any]:
        """Put the tensors where the workers see them; the weights just evaluated are there already."""
        sent = self._sent
        if sent and sent[0] is broadcast.weights and sent[1] is broadcast.mask and not broadcast.extra:
            return {**sent[2], "round": broadcast.round, "lr": broadcast.lr}
        header = pack_broadcast(broadcast, self._down)
        self._sent = None if broadcast.extra else (broadcast.weights, broadcast.mask, header)
        return header

    def _in_order(
        self, jobs: Iterable[Job], unpack: Callable[[dict[str, Any], Region], Value]
    ) -> Iterator[Value]:
        """Run jobs on the workers and yield results in order. At most two results a worker are under way, so
        memory does not grow with the number of jobs."""
        source = iter(jobs)
        waiting: deque[Future[Value]] = deque()
        for job in source:
            waiting.append(self._threads.submit(self._run, job, unpack))
            if len(waiting) >= 2 * self._workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _run(self, job: Job, unpack: Callable[[dict[str, Any], Region], Value]) -> Value:
        deaths = 0
        while True:
            process = self._idle.get()
            try:
                return unpack(process.call(*job), process.up)
            except WorkerDiedError as death:
                if self._closing:
                    raise
                process = self._replace(process)
                deaths += 1
                if deaths == TRIES:
                    raise FeddumapError(
                        f"the worker process of a {job[0]['verb']} job died {TRIES} times (last: {death}), "
                        f"perhaps for want of memory: lower run.workers (now {self._workers}) and resume"
                    ) from None
            finally:
                self._idle.put(process)

    def _replace(self, dead: Process) -> Process:
        fresh = Process(self._setup, self._down, self._fixed)
        self._processes[self._processes.index(dead)] = fresh
        dead.close()
        return fresh

    def close(self) -> None:
        """End the workers, also in the middle of a job."""
        self._closing = True
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.close()
        self._down.close()
        self._fixed.close()
