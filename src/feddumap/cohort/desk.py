"""The device side, whatever carries the messages: from a broadcast to an upload or an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from feddumap.algorithm import Algorithm
from feddumap.config import Config
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split
from feddumap.device.reports import answer
from feddumap.device.task import Holdings, Task
from feddumap.memory import Memory
from feddumap.recipes import compose
from feddumap.seeds import stream
from feddumap.tensors import all_finite
from feddumap.training.evaluation import Score, chunks, score
from feddumap.training.loop import fit
from feddumap.training.model import Model, make
from feddumap.training.samples import Samples
from feddumap.types import Answer, Architecture, Broadcast, Question, ServerState, Tensors, Upload


@dataclass(frozen=True)
class SplitHoldings:
    """Simulated devices: each holds its part of one data set."""

    dataset: Dataset
    split: Split
    seed: int

    def labels(self, device: int) -> np.ndarray:
        return self.dataset.train_labels[self.split.device(device)]

    def samples(self, device: int) -> Samples:
        return self._take(self.split.device(device))

    def shared(self, device: int, limit: int) -> Samples:
        server = self.split.server
        if limit < len(server):
            rng = stream(self.seed, "shared", device)
            server = np.sort(rng.choice(server, limit, replace=False))
        return self._take(server)

    def _take(self, indices: np.ndarray) -> Samples:
        return Samples.take(self.dataset.train_images, self.dataset.train_labels, indices)


class Desk:
    """Carries out what the server asks of a device."""

    def __init__(self, config: Config, holdings: Holdings, algorithm: Algorithm | None = None) -> None:
        self._config = config
        self._holdings = holdings
        self._algorithm = algorithm or compose(config)

    def train(self, broadcast: Broadcast, device: int, memory: Tensors) -> tuple[Upload, Tensors]:
        """What a device with this memory sends, and what it keeps (nothing anew, if what it sends or keeps
        is not finite)."""
        task = Task(device, broadcast, self._holdings, self._config, memory)
        plan = self._algorithm.local(task, self._algorithm.device_data(task))
        steps = 0
        if plan.model is not None and plan.rule is not None:
            steps = fit(plan.model, plan.batches, plan.rule, broadcast.lr)
        upload = plan.report(steps)
        good = not task.kept or (all_finite(task.kept) and all_finite(upload.weights))
        return upload, task.kept if good else {}

    def answer(self, question: Question, broadcast: Broadcast, device: int) -> Answer:
        return answer(question, Task(device, broadcast, self._holdings, self._config))


@dataclass(frozen=True)
class Examiner:
    """Scores a model on the test images, chunk by chunk."""

    dataset: Dataset
    config: Config

    def model(self, architecture: Architecture, weights: Tensors) -> Model:
        return make(architecture, weights, self.config.train.kernels, self.config.run.device)

    def chunk(self, model: Model, start: int, stop: int) -> Score:
        images, labels = self.dataset.test_images, self.dataset.test_labels
        return score(model, Samples.take(images, labels, np.arange(start, stop)).to(self.config.run.device))

    def whole(self, state: ServerState) -> Score:
        model = self.model(state.architecture, state.weights)
        return Score.total(self.chunk(model, *span) for span in chunks(len(self.dataset.test_labels)))


class LocalCohort:
    """All devices in this process, one after another."""

    def __init__(self, desk: Desk, examiner: Examiner, memory: Memory) -> None:
        self._desk = desk
        self._examiner = examiner
        self._memory = memory

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload]:
        number = broadcast.round
        for device in devices:
            upload, kept = self._desk.train(broadcast, device, self._memory.recall(device, number))
            if kept:
                self._memory.keep(device, number, kept)
            yield upload

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        return (self._desk.answer(question, broadcast, device) for device in devices)

    def evaluate(self, state: ServerState) -> Score:
        return self._examiner.whole(state)

    def close(self) -> None:
        """Nothing is held."""
