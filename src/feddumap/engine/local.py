"""Devices in this process, and the evaluation of the global model on the test images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from feddumap.config import Config
from feddumap.core.messages import Answer, Architecture, Broadcast, Question, ServerState, Tensors, Upload
from feddumap.data.dataset import Dataset
from feddumap.device.executor import Executor
from feddumap.device.state import StateStore
from feddumap.training.evaluation import Score, chunks, score
from feddumap.training.model import Model, make
from feddumap.training.samples import Samples


@dataclass(frozen=True)
class Evaluator:
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

    def __init__(self, desk: Executor, examiner: Evaluator, memory: StateStore) -> None:
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
