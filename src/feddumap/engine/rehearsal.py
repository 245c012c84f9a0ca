"""A rehearsal of a user's method: one tiny round before the run directory exists, so that a slot that fails
or returns what it must not is found at the start and not after hours.

Two devices with a few samples train in this process, on copies, with memories that are thrown away. Nothing
of the run is touched: its random streams have names and no state, and the global generators are put back.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from feddumap.config import Config
from feddumap.core import clock
from feddumap.core.algorithm import Algorithm, Census, Context
from feddumap.core.messages import ServerState
from feddumap.data import partition
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.device.state import InMemoryStore
from feddumap.engine.local import Evaluator, LocalCohort
from feddumap.engine.rounds import initial_state, rounds
from feddumap.errors import FeddumapError
from feddumap.methods.guard import SlotError, SlotFailedError
from feddumap.methods.registry import compose, find
from feddumap.runs.stored_forms import record_line
from feddumap.system.determinism import deterministic
from feddumap.training.evaluation import Score
from feddumap.training.samples import Samples

SKIP = "FEDDUMAP_REHEARSAL"
DEVICES, BATCH, BATCHES = 2, 16, 2


def rehearse(config: Config, dataset: Dataset, split: Split, state: ServerState) -> None:
    """Raise an error for a method of the user's own whose slots fail; methods of this package are not tried.
    `FEDDUMAP_REHEARSAL=0` skips it, for a method that cannot work with so little data."""
    if find(config.method.name).trusted or os.environ.get(SKIP) == "0":
        return
    with deterministic(), _global_generators_restored():
        try:
            _one_round(_shortened(config), dataset, split, state)
        except SlotFailedError as error:
            devices = min(DEVICES, config.data.devices)
            raise FeddumapError(
                f"{error}; this was a rehearsal with {devices} devices of at most {BATCH * BATCHES} samples, "
                f"which {SKIP}=0 skips"
            ) from error


def _shortened(config: Config) -> Config:
    devices = min(DEVICES, config.data.devices)
    return config.replace(
        data={"devices": devices},
        train={
            "cohort": devices,
            "epochs": 1,
            "batch": min(BATCH, config.train.batch),
            "lr": min(1e-4, config.train.lr),
        },
        clock={"profile": "general", "fleet": None, "deadline": None},
    )


def _one_round(config: Config, dataset: Dataset, split: Split, given: ServerState) -> None:
    algorithm = compose(config)
    few = BATCHES * config.train.batch
    weights = {name: tensor.clone() for name, tensor in given.weights.items()}
    state = initial_state(given.architecture, algorithm, weights)
    whole = SplitHoldings(dataset, split, config.run.seed)
    executor = Executor(config, FewSamples(whole, few), algorithm)
    cohort = LocalCohort(executor, Evaluator.of(dataset, split, config), InMemoryStore())
    context = _context(config, dataset, split, algorithm, few)
    state, record = next(rounds(state, algorithm, context, cohort, lambda _: Score(0, 0.0, 1)))
    record_line(record)
    _try_reshape(algorithm, state, context, cohort)


def _try_reshape(algorithm: Algorithm, state: ServerState, context: Context, cohort: LocalCohort) -> None:
    """Change the model's shape as the method will in the first later round that does anything."""
    last = algorithm.rounds(context.config)
    for number in range(1, last):
        now = replace(state, round=number)
        try:
            changed, metrics = algorithm.reshape(now, context, cohort)
        except SlotError:
            raise
        except FeddumapError:
            return  # of our own parts, which may need more than these few samples
        if changed is not now or metrics:
            return


def _context(config: Config, dataset: Dataset, split: Split, algorithm: Algorithm, few: int) -> Context:
    labels = [dataset.train_labels[split.device(device)][:few] for device in range(config.data.devices)]
    counts = None
    if algorithm.labels != "none":
        classes = len(dataset.classes)
        counts = np.array([np.bincount(own, minlength=classes) for own in labels], dtype=np.float64)
    census = Census(np.array([len(own) for own in labels], dtype=np.int64), counts)
    held_out = partition.validation(
        dataset.train_labels, len(dataset.classes), config.data, split, config.run.seed, dataset.train_users
    )
    server, validation = (
        Samples.take(dataset.train_inputs, dataset.train_labels, rows[:few])
        for rows in (split.server, held_out)
    )
    timing = clock.build(config.clock, config.model.name, config.data.devices, config.run.seed)
    return Context(config, server, census, timing, validation=validation if len(held_out) else None)


@dataclass(frozen=True)
class FewSamples:
    """Devices that hold only the first samples of what they hold."""

    whole: SplitHoldings
    most: int

    def labels(self, device: int) -> np.ndarray:
        return self.whole.labels(device)[: self.most]

    def samples(self, device: int) -> Samples:
        return self._first(self.whole.samples(device))

    def shared(self, device: int, limit: int) -> Samples:
        return self._first(self.whole.shared(device, limit))

    def _first(self, samples: Samples) -> Samples:
        return Samples(samples.inputs[: self.most], samples.targets[: self.most])


@contextmanager
def _global_generators_restored() -> Iterator[None]:
    """Put the generators back that a user's code may use in place of named streams."""
    ours, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
