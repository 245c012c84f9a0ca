"""Trains devices in this process and evaluates the global model on the test images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from feddumap.attacks.samples import triggered
from feddumap.config import Config
from feddumap.core.messages import Answer, Architecture, Broadcast, Question, ServerState, Tensors, Upload
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split, devices_of_tests
from feddumap.device.executor import Executor
from feddumap.device.state import StateStore
from feddumap.training.backends import make_model
from feddumap.training.evaluation import Score, chunks, score
from feddumap.training.model import Model
from feddumap.training.samples import Samples


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model on the test images in chunks. `devices`, if known, are those that each belongs to."""

    dataset: Dataset
    config: Config
    devices: np.ndarray | None = None

    @staticmethod
    def of(dataset: Dataset, split: Split, config: Config) -> Evaluator:
        """With the devices of the test images, if the data set's users are the devices."""
        natural = config.data.partition == "natural"
        devices = devices_of_tests(split, dataset.train_users, dataset.test_users) if natural else None
        return Evaluator(dataset, config, devices)

    def model(self, architecture: Architecture, weights: Tensors) -> Model:
        return make_model(architecture, weights, self.config.train.kernels, self.config.run.device)

    def chunk(self, model: Model, start: int, stop: int) -> Score:
        images, labels = self.dataset.test_inputs, self.dataset.test_labels
        samples = Samples.take(images, labels, np.arange(start, stop)).to(self.config.run.device)
        found = score(model, samples, None if self.devices is None else self.devices[start:stop])
        if self.config.attack.name != "backdoor":
            return found
        marked = triggered(samples, self.config.attack)
        return replace(found, backdoor=(score(model, marked).correct if len(marked) else 0, len(marked)))

    def whole(self, state: ServerState) -> Score:
        model = self.model(state.architecture, state.weights)
        return Score.total(self.chunk(model, *span) for span in chunks(len(self.dataset.test_labels)))


class LocalCohort:
    """A cohort whose devices run one after another in this process."""

    def __init__(self, executor: Executor, evaluator: Evaluator, states: StateStore) -> None:
        self._executor = executor
        self._evaluator = evaluator
        self._states = states

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload]:
        number = broadcast.round
        for device in devices:
            upload, kept = self._executor.train(broadcast, device, self._states.recall(device, number))
            if kept:
                self._states.keep(device, number, kept)
            yield upload

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        return (self._executor.answer(question, broadcast, device) for device in devices)

    def evaluate(self, state: ServerState) -> Score:
        return self._evaluator.whole(state)

    def close(self) -> None:
        """No resources to release."""
