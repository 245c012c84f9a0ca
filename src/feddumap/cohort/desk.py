"""The device side, whatever carries the messages: from a broadcast to an upload or an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from feddumap.algorithm import Algorithm
from feddumap.config import Config
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split
from feddumap.device.evaluation import Score, chunks, score
from feddumap.device.reports import answer
from feddumap.device.task import Holdings, Task
from feddumap.device.team import carry_out
from feddumap.device.training import Samples
from feddumap.memory import Memory
from feddumap.models import network
from feddumap.recipes import compose
from feddumap.seeds import stream
from feddumap.tensors import all_finite
from feddumap.types import Answer, Broadcast, Question, ServerState, Tensors, Upload


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


def squads(devices: Sequence[int], size: int) -> list[Sequence[int]]:
    """The devices that are trained side by side, `size` at a time: it depends on nothing else.

    >>> squads([3, 5, 8, 9, 11], 2)
    [[3, 5], [8, 9], [11]]
    """
    return [devices[i : i + size] for i in range(0, len(devices), size)]


class Desk:
    """Carries out what the server asks of a device."""

    def __init__(self, config: Config, holdings: Holdings, algorithm: Algorithm | None = None) -> None:
        self._config = config
        self._holdings = holdings
        self._algorithm = algorithm or compose(config)
        self.stack = max(1, config.train.stack)

    def train(self, broadcast: Broadcast, memories: Mapping[int, Tensors]) -> list[tuple[Upload, Tensors]]:
        """For each device, by its number and memory: what it sends, and what it keeps (nothing anew, if what
        it sends or keeps is not finite)."""
        tasks = [Task(k, broadcast, self._holdings, self._config, own) for k, own in memories.items()]
        plans = [self._algorithm.local(task, self._algorithm.device_data(task)) for task in tasks]
        results = []
        for upload, task in zip(carry_out(tasks, plans), tasks, strict=True):
            good = not task.kept or (all_finite(task.kept) and all_finite(upload.weights))
            results.append((upload, task.kept if good else {}))
        return results

    def answer(self, question: Question, broadcast: Broadcast, device: int) -> Answer:
        return answer(question, Task(device, broadcast, self._holdings, self._config))


@dataclass(frozen=True)
class Examiner:
    """Scores a model on the test images, chunk by chunk."""

    dataset: Dataset
    device: str

    def chunk(self, model: nn.Module, start: int, stop: int) -> Score:
        images, labels = self.dataset.test_images, self.dataset.test_labels
        return score(model, Samples.take(images, labels, np.arange(start, stop)).to(self.device))

    def whole(self, state: ServerState) -> Score:
        model = network(state.architecture, state.weights).to(self.device)
        return Score.total(self.chunk(model, *span) for span in chunks(len(self.dataset.test_labels)))


class LocalCohort:
    """All devices in this process, one after another."""

    def __init__(self, desk: Desk, examiner: Examiner, memory: Memory) -> None:
        self._desk = desk
        self._examiner = examiner
        self._memory = memory

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload]:
        number = broadcast.round
        for some in squads(devices, self._desk.stack):
            memories = {device: self._memory.recall(device, number) for device in some}
            for upload, kept in self._desk.train(broadcast, memories):
                if kept:
                    self._memory.keep(upload.device, number, kept)
                yield upload

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        return (self._desk.answer(question, broadcast, device) for device in devices)

    def evaluate(self, state: ServerState) -> Score:
        return self._examiner.whole(state)

    def close(self) -> None:
        """Nothing is held."""
