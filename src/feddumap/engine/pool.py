"""A cohort of worker processes on this machine: one thread each, data and weights in shared memory.

Every worker is driven by one thread of this process that waits for its reply, so a worker that dies is
noticed at once (its pipe closes), replaced, and its job given to the new one.
"""

from __future__ import annotations

import json
import os
import queue
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
from feddumap.engine.worker import pack_broadcast, unpack_answers, unpack_uploads
from feddumap.errors import FeddumapError
from feddumap.training.evaluation import Score, chunks

TRIES = 3
LIGHT_STRETCH = 256  # devices that share the message of a light question

Value = TypeVar("Value")
Groups = dict[str, Tensors]
Job = tuple[dict[str, Any], Groups]
"""What a worker is told, and the memories of the devices it works for."""


class WorkerDiedError(Exception):
    """The process ended; the exit code says how."""


class Process:
    """One worker process and the pipes to it. `regions` are those that its jobs may name."""

    def __init__(self, setup: dict[str, Any], down: Region, fixed: Region, regions: Sequence[Region]) -> None:
        orders, ours_out = os.pipe()
        ours_in, replies = os.pipe()
        self._fork_server: ForkServer = shared()
        try:
            self.pid = self._fork_server.fork(
                [orders, replies, *(region.fd for region in (down, fixed, *regions))]
            )
        except ForkServerDiedError as error:
            raise FeddumapError(
                f"no worker process could be started ({error}), perhaps for want of memory: lower run.workers"
            ) from None
        finally:
            os.close(orders)
            os.close(replies)
        self._orders = os.fdopen(ours_out, "w", encoding="utf-8")
        self._replies = os.fdopen(ours_in, encoding="utf-8")
        self._regions = regions
        self._code: int | None = None
        self._setup: dict[str, Any] | None = setup
        self._send(setup)

    def call(self, job: dict[str, Any], memories: dict[str, Tensors], region: Region) -> dict[str, Any]:
        """Give a job, with the devices' memories in the region where its results will be, and wait."""
        if self._setup is not None:
            self._receive()  # ready
            self._setup = None
        where = self._regions.index(region)
        self._send({**job, "region": where, "memory": region.write(memories)})
        return self._receive()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._orders.write(json.dumps(message) + "\n")
            self._orders.flush()
        except (BrokenPipeError, ValueError):
            raise WorkerDiedError(self._ended()) from None

    def _receive(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line.endswith("\n"):
            raise WorkerDiedError(self._ended())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise FeddumapError(reply["error"])
        if "bug" in reply:
            raise RuntimeError(f"a worker failed:\n{reply['bug']}")
        return reply

    def _ended(self) -> str:
        if self._code is None:
            try:
                self._code = self._fork_server.wait(self.pid)
            except ForkServerDiedError:
                return "unknown, since the process that it came from is gone too"
        return f"signal {-self._code}" if self._code < 0 else f"exit code {self._code}"

    def kill(self) -> None:
        if self._code is None and self._fork_server.alive:  # only then is the id still its own
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Reap the process; its thread must be done with it."""
        self.kill()
        for pipe in (self._orders, self._replies):
            try:
                pipe.close()
            except BrokenPipeError:  # a job that it did not live to read
                continue
        self._ended()


class Pool:
    """`workers` processes that train, answer and evaluate; results come back in the order asked."""

    def __init__(
        self, config: Config, folder: Path, split: Split, test_images: int, workers: int, memory: StateStore
    ) -> None:
        self._down, self._fixed = Region(), Region()
        arrays = {name: torch.from_numpy(array) for name, array in split.to_arrays().items()}
        self._setup = {
            "config": config.model_dump(),
            "dataset": str(folder),
            "split": self._fixed.write({"split": arrays}),
            "path": search_path(),
        }
        self._spans = chunks(test_images)
        self._workers = workers
        self._memory = memory
        self._closing = False
        self._sent: tuple[Tensors, Tensors, dict[str, Any]] | None = None
        # two results a worker may be under way, while others are being added up
        self._regions = RegionPool(2 * workers + TOGETHER, stay=workers)
        self._processes = [self._worker() for _ in range(workers)]
        self._idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="feddumap-worker")

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [process.pid for process in self._processes]

    def _worker(self) -> Process:
        return Process(self._setup, self._down, self._fixed, self._regions.all)

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload]:
        header = self._share(broadcast)
        number = broadcast.round
        jobs = (
            (
                {"verb": "train", "broadcast": header, "devices": [device]},
                {str(device): self._memory.recall(device, number)},
            )
            for device in devices
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
        self, jobs: Iterable[Job], unpack: Callable[[dict[str, Any], Groups], Value]
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

    def _run(self, job: Job, unpack: Callable[[dict[str, Any], Groups], Value]) -> Value:
        region = self._regions.take()
        try:
            reply = self._tried(job, region)
        except BaseException:
            self._regions.give_back(region)
            raise
        return unpack(reply, self._regions.lend(region, reply.get("layout", [])))

    def _tried(self, job: Job, region: Region) -> dict[str, Any]:
        deaths = 0
        while True:
            process = self._idle.get()
            try:
                return process.call(*job, region)
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
        fresh = self._worker()
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
        for region in (self._down, self._fixed, self._regions):
            region.close()
