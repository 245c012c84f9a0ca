"""A run while it is open: its state, its records, its directory, and the loop that trains the rounds left."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any

import numpy as np
from torch import nn

from feddumap import screening
from feddumap.config import Config
from feddumap.core import clock
from feddumap.core.algorithm import Census, Context
from feddumap.core.messages import ServerState
from feddumap.core.object_names import is_object, stored_name
from feddumap.core.record import Record
from feddumap.data import partition
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split
from feddumap.device.state import InMemoryStore, StateStore
from feddumap.engine import census as censuses
from feddumap.engine.callbacks import Callback
from feddumap.engine.cohort import Engine, open_cohort
from feddumap.engine.first_weights import initial_weights
from feddumap.engine.registry import get_engine
from feddumap.engine.rehearsal import rehearse
from feddumap.engine.resolution import architecture_of, require_family
from feddumap.engine.rounds import active_parameters, initial_state, rounds, take_census
from feddumap.errors import FeddumapError
from feddumap.methods import compose
from feddumap.models import network, separate
from feddumap.models.cost import macs
from feddumap.runs import trackers
from feddumap.runs.directory import RunDirectory
from feddumap.runs.summary import accuracies, device_accuracy, is_complete, reached
from feddumap.runs.trackers.base import Tracker
from feddumap.screening.privacy import spent as epsilon_after
from feddumap.system.callbacks import Progress, Say, ignore
from feddumap.system.determinism import deterministic
from feddumap.training.samples import Samples


class Session:
    """An open run. Iterating over it trains the remaining rounds and yields their records; it may stop early.

    `records` has a record per round, `state` is the server state after the last round. `engine`, if set,
    makes the cohort instead of the engine that `run.engine` names. `callbacks` are called after each round.
    `out` is the path of the run directory, also after the run is closed.
    """

    engine: Callable[[Any], Engine] | None = None

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        split: Split,
        directory: RunDirectory | None = None,
        say: Say = ignore,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.split = split
        self.directory = directory
        self.out = directory.path if directory is not None else None
        self.callbacks = tuple(callbacks)
        self.records: list[Record] = []
        self._say = say
        self._algorithm = compose(config)
        self._clock = clock.build(config.clock, config.model.name, config.data.devices, config.run.seed)
        shape = architecture_of(config, dataset)
        shape, start = separate(shape, initial_weights(shape, config, directory))
        self.state = initial_state(shape, self._algorithm, start)
        self._in_memory = InMemoryStore()
        self._key = secrets.randbits(256)
        self._trackers: list[Tracker] | None = None
        self._iteration: Generator[Record] | None = None
        self._stopping = False
        self._wall = 0.0
        self._saved_round = -1

    @property
    def rounds(self) -> int:
        """The number of rounds, 1 for one-shot methods."""
        return self._algorithm.rounds(self.config)

    @property
    def finished(self) -> bool:
        """Whether all rounds are done or the target was reached."""
        return is_complete(self.records, self.rounds, self.config.run.target)

    def check(self) -> None:
        """Raise an error for a run that would fail later."""
        self._algorithm.check(self.state.architecture)
        self._validation()
        if len(self.split.server) < (least := self._algorithm.server_data):
            images = "images" if least == 1 else f"at least {least} images"
            raise FeddumapError(
                f"method.name = {self.config.method.name!r} needs {images} on the server, but "
                f"data.server_fraction = {self.config.data.server_fraction:g} gives "
                f"{len(self.split.server) or 'none'}: raise it"
            )
        screening.check(self.config, self._algorithm, len(self.split.server))
        self._check_privacy()
        rehearse(self.config, self.dataset, self.split, self.state)

    def _check_privacy(self) -> None:
        privacy = self.config.privacy
        if privacy.on and privacy.epsilon is not None:
            spent = epsilon_after(self.config, self._algorithm, self.rounds)
            if spent > privacy.epsilon:
                raise FeddumapError(
                    f"privacy.noise = {privacy.noise:g} gives ε = {spent:.4g} after {self.rounds} rounds, "
                    f"more than privacy.epsilon = {privacy.epsilon:g}: raise one of them, or leave "
                    "privacy.noise out"
                )

    def __iter__(self) -> Iterator[Record]:
        return self.iterate()

    def iterate(self, progress: Progress = ignore) -> Iterator[Record]:
        """Train round by round. `progress(task, done, total)` is called for each device and survey. An
        earlier iteration that was left is ended first."""
        self._end_iteration()
        self._iteration = self._iterate(progress)
        return self._iteration

    def _iterate(self, progress: Progress) -> Generator[Record]:
        if self._trackers is None:
            self._trackers = trackers.start(self.config, self.directory, self.records)
        self._stopping = bool(self.records) and any(
            each.replay(self) for each in self.callbacks if hasattr(each, "replay")
        )
        if self._ended():
            self._finish()
            return
        started = time.perf_counter() - self._wall
        with deterministic():
            engine = self._engine()
        try:
            with deterministic():
                context = self._context(engine, progress)
            for sentence in self._algorithm.idle(context):
                self._say(sentence)
            steps = rounds(
                self.state, self._algorithm, context, engine, engine.evaluate, self._remember_census
            )
            while not self._ended():
                with deterministic():  # not around the yield: callers keep their settings
                    step = next(steps, None)
                if step is None:
                    break
                self._wall = time.perf_counter() - started
                self._record(*step)
                self._call_back()
                yield self.records[-1]
        finally:
            engine.close()
            self._checkpoint()
        self._finish()

    def _ended(self) -> bool:
        return self._stopping or self.finished

    def _call_back(self) -> None:
        for callback in self.callbacks:
            if callback(self, self.records[-1]) is True:
                self.stop()

    def stop(self) -> None:
        """End the iteration after the present round, as a callback does that returns True."""
        self._stopping = True

    def model(self) -> nn.Module:
        """The global network with its current weights, in eval mode."""
        return network(self.state.architecture, self.state.weights).eval()

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        by_device = device_accuracy(self.records)
        wanted = sorted({*self.config.run.targets, *filter(None, [self.config.run.target])})
        return {
            "method": stored_name(self.config.method.name),
            "model": stored_name(self.config.model.name),
            "dataset": self.dataset.name,
            "rounds": self.state.round,
            "configured_rounds": self.config.train.rounds,
            "accuracy": accuracies(self.records),
            **({"device_accuracy": by_device} if by_device else {}),
            "targets": {str(target): reached(self.records, target) for target in wanted},
            "parameters": active_parameters(self.state),
            "macs": macs(self.state.architecture),
            "bytes_down": sum(record.bytes_down for record in self.records),
            "bytes_up": sum(record.bytes_up for record in self.records),
            "clock": self.state.clock,
            "wall": self._wall,
        }

    def _engine(self) -> Engine:
        engine = self.engine or get_engine(self.config.run.engine)
        if engine is not None:
            return engine(self)
        states: StateStore = self.directory.memory if self.directory is not None else self._in_memory
        return open_cohort(self.config, self.dataset, self.split, self._algorithm, states, self._say)

    def _context(self, engine: Engine, progress: Progress = ignore) -> Context:
        data = self.dataset
        server = Samples.take(data.train_inputs, data.train_labels, self.split.server)
        census = take_census(
            engine,
            self.state,
            self.config,
            self._algorithm.labels,
            whole=self._algorithm.one_shot,  # nobody could join later
            earlier=self._earlier_census(),
        )
        self._remember_census(census)
        held_out = self._validation()
        validation = Samples.take(data.train_inputs, data.train_labels, held_out) if len(held_out) else None
        return Context(self.config, server, census, self._clock, progress, validation, self._secret())

    def _secret(self) -> int | None:
        """The key of a private run: of its directory, or else of this object."""
        if not (self.config.privacy.on and self.config.privacy.secret):
            return None
        if self.directory is not None:
            return self.directory.secret(new=self.state.round == 0)
        return self._key

    def _earlier_census(self) -> Census | None:
        """What devices told before the run was interrupted, for those that are not there yet."""
        value = self.directory.census() if self.directory is not None else None
        sizes = self.config.data.devices, self.state.architecture.classes
        try:
            return censuses.from_json(value, *sizes) if value is not None else None
        except ValueError as error:
            self._say(f"the census in {self.out} cannot be used: {error}; devices are asked again")
            return None

    def _remember_census(self, census: Census) -> None:
        """Devices may be missing when a run over a network is resumed, but never in a simulation."""
        if self.directory is not None and self.config.run.engine != "local":
            self.directory.keep_census(censuses.to_json(census))

    def _validation(self) -> np.ndarray:
        data, config = self.dataset, self.config
        return partition.validation(
            data.train_labels, len(data.classes), config.data, self.split, config.run.seed, data.train_users
        )

    def _record(self, state: ServerState, record: Record) -> None:
        """Append the record, then advance: if it cannot be written, this run is still in the round before."""
        record = replace(record, wall=self._wall)
        if self.directory is not None:
            self.directory.append(record)
        self.state = state
        self.records.append(record)
        if self.directory is not None:
            for tracker in self._trackers or ():
                tracker.add(record)
            if state.round % self.config.run.checkpoint_every == 0:
                self._checkpoint()

    def _checkpoint(self) -> None:
        if self.directory is not None and self.state.round != self._saved_round:
            self.directory.save(self.state, self._wall)
            self._saved_round = self.state.round

    def _finish(self) -> None:
        if self.directory is not None:
            self.directory.write_summary(self.summary)

    def _end_iteration(self) -> None:
        if self._iteration is not None and getgeneratorstate(self._iteration) != GEN_RUNNING:
            self._iteration.close()
            self._iteration = None

    def close(self) -> None:
        """End an iteration that was left, and release the run directory."""
        self._end_iteration()
        for tracker in self._trackers or ():
            tracker.close()
        self._trackers = None
        if self.directory is not None:
            self.directory.close()
            self.directory = None

    def restore(self, say: Say) -> None:
        """Load the newest valid checkpoint of the run directory."""
        assert self.directory is not None
        checkpoint, damaged = self.directory.latest()
        if damaged:
            from_round = checkpoint.state.round if checkpoint else 0
            say(f"{'; '.join(damaged)}: resuming from round {from_round}")
        before = (checkpoint.config or {}).get("train", {}).get("rounds") if checkpoint else None
        if before is not None and before != self.config.train.rounds:
            say(f"train.rounds is {self.config.train.rounds} now; it was {before} at the last checkpoint")
        if checkpoint is not None:
            require_family(checkpoint.state.architecture, self.config)
            self.state, self._wall, self._saved_round = (
                checkpoint.state,
                checkpoint.wall,
                checkpoint.state.round,
            )
            if is_object(self.config.model.name):  # its name in this process
                shape = replace(self.state.architecture, family=self.config.model.name)
                self.state = replace(self.state, architecture=shape)
        self.records = [Record.from_json(value) for value in self.directory.rewind(self.state.round)]
