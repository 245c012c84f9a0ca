"""Training from Python: `train`, `start` and `resume` return a `Run`; iterating over it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from feddumap import config as configuration
from feddumap.config import RUNTIME_KEYS, Config
from feddumap.core import clock
from feddumap.core.algorithm import Cohort, Context, Progress
from feddumap.core.messages import Architecture, ServerState, Tensors
from feddumap.data import partition
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.device.state import InMemoryStore, StateStore
from feddumap.engine.local import Evaluator, LocalCohort
from feddumap.engine.pool import Pool
from feddumap.engine.registry import get_engine
from feddumap.engine.resolution import complete as complete
from feddumap.engine.resolution import make_split, resolve
from feddumap.engine.rounds import RoundRecord, active_parameters, initial_state, rounds, take_census
from feddumap.errors import FeddumapError
from feddumap.methods import compose
from feddumap.models import architecture, initialise, network
from feddumap.models.cost import macs
from feddumap.models.weights import read_weights
from feddumap.runs import tensorboard as events
from feddumap.runs.directory import RunDirectory, contains_run
from feddumap.runs.reader import legacy_stack_size
from feddumap.runs.summary import accuracies, is_complete, reached
from feddumap.system.callbacks import Say, ignore
from feddumap.system.determinism import cores, deterministic
from feddumap.training.evaluation import Score
from feddumap.training.samples import Samples


class Engine(Cohort, Protocol):
    """A cohort that also evaluates the global model and is closed at the end."""

    def evaluate(self, state: ServerState) -> Score: ...

    def close(self) -> None: ...


class Run:
    """A training run. Iterating over it trains the remaining rounds and yields their records; it may stop
    early.

    `records` has a dictionary per round, `state` is the server state after the last round. `engine`, if set,
    makes the cohort instead of the engine that `run.engine` names.
    """

    engine: Callable[[Run], Engine] | None = None

    def __init__(
        self, config: Config, dataset: Dataset, split: Split, directory: RunDirectory | None = None
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.split = split
        self.directory = directory
        self.records: list[dict[str, Any]] = []
        self._algorithm = compose(config)
        family, classes = config.model.name, len(dataset.classes)
        self._clock = clock.build(config.clock, family, config.data.devices, config.run.seed)
        start = initial_weights(architecture(family, classes), config, directory)
        self.state = initial_state(architecture(family, classes), self._algorithm, start)
        self._in_memory = InMemoryStore()
        self._events: events.Events | None = None
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
        if self._algorithm.server_data and not len(self.split.server):
            raise FeddumapError(
                f"method.name = {self.config.method.name!r} needs images on the server, but "
                f"data.server_fraction = {self.config.data.server_fraction:g} gives none: raise it"
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.iterate()

    def iterate(self, progress: Progress = ignore) -> Iterator[dict[str, Any]]:
        """Train round by round. `progress(task, done, total)` is called for each device and survey."""
        self._open_events()
        if self.finished:
            self._finish()
            return
        started = time.perf_counter() - self._wall
        with deterministic():
            engine = self._engine()
        try:
            with deterministic():
                context = self._context(engine, progress)
            steps = rounds(self.state, self._algorithm, context, engine, engine.evaluate)
            while True:
                with deterministic():  # not around the yield: callers keep their settings
                    step = next(steps, None)
                if step is None:
                    break
                self._wall = time.perf_counter() - started
                self._record(*step)
                yield self.records[-1]
                if is_complete(self.records, self.rounds, self.config.run.target):
                    break
        finally:
            engine.close()
            self._checkpoint()
        self._finish()

    def run(self, on_round: Callable[[dict[str, Any]], None] | None = None) -> Run:
        """Train to the end."""
        for record in self:
            if on_round is not None:
                on_round(record)
        return self

    def model(self) -> nn.Module:
        """The global network with its current weights, in eval mode."""
        return network(self.state.architecture, self.state.weights).eval()

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        wanted = sorted({*self.config.run.targets, *filter(None, [self.config.run.target])})
        return {
            "method": self.config.method.name,
            "model": self.config.model.name,
            "dataset": self.dataset.name,
            "rounds": self.state.round,
            "configured_rounds": self.config.train.rounds,
            "accuracy": accuracies(self.records),
            "targets": {str(target): reached(self.records, target) for target in wanted},
            "parameters": active_parameters(self.state),
            "macs": macs(self.state.architecture),
            "bytes_down": sum(record["bytes_down"] for record in self.records),
            "bytes_up": sum(record["bytes_up"] for record in self.records),
            "clock": self.state.clock,
            "wall": self._wall,
        }

    def _open_events(self) -> None:
        """Open the TensorBoard event file with the records so far, if `run.tensorboard` is set."""
        if not self.config.run.tensorboard or self._events is not None:
            return
        if self.directory is None:
            raise FeddumapError("run.tensorboard = true needs a run directory to write in: give `out`")
        path = self.directory.path
        began = (path / "split.safetensors").stat().st_mtime
        self._events = events.Events(path / "tensorboard", self.records, began)

    def _engine(self) -> Engine:
        config = self.config
        engine = self.engine or get_engine(config.run.engine)
        if engine is not None:
            return engine(self)
        states: StateStore = self.directory.memory if self.directory is not None else self._in_memory
        workers = config.run.workers or min(cores(), len(self._algorithm.choose(config, 0)))
        if workers > 1 and config.run.device == "cpu":
            test_images = len(self.dataset.test_labels)
            return Pool(config, self.dataset.folder, self.split, test_images, workers, states)
        holdings = SplitHoldings(self.dataset, self.split, config.run.seed)
        executor = Executor(config, holdings, self._algorithm)
        return LocalCohort(executor, Evaluator(self.dataset, config), states)

    def _context(self, engine: Engine, progress: Progress = ignore) -> Context:
        data = self.dataset
        server = Samples.take(data.train_images, data.train_labels, self.split.server)
        census = take_census(engine, self.state, self.config, self._algorithm.labels)
        held_out = self._validation()
        validation = Samples.take(data.train_images, data.train_labels, held_out) if len(held_out) else None
        return Context(self.config, server, census, self._clock, progress, validation)

    def _validation(self) -> np.ndarray:
        data, config = self.dataset, self.config
        return partition.validation(
            data.train_labels, len(data.classes), config.data, self.split, config.run.seed
        )

    def _record(self, state: ServerState, record: RoundRecord) -> None:
        self.state = state
        self.records.append(replace(record, wall=self._wall).to_json())
        if self.directory is not None:
            self.directory.append(self.records[-1])
            if self._events is not None:
                self._events.add(self.records[-1])
            if state.round % self.config.run.checkpoint_every == 0:
                self._checkpoint()

    def _checkpoint(self) -> None:
        if self.directory is not None and self.state.round != self._saved_round:
            self.directory.save(self.state, self._wall)
            self._saved_round = self.state.round

    def _finish(self) -> None:
        if self.directory is not None:
            self.directory.write_summary(self.summary)

    def close(self) -> None:
        """Release the run directory."""
        if self._events is not None:
            self._events.close()
            self._events = None
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
        if checkpoint is not None:
            self.state, self._wall, self._saved_round = (
                checkpoint.state,
                checkpoint.wall,
                checkpoint.state.round,
            )
        self.records = self.directory.rewind(self.state.round)


def initial_weights(shape: Architecture, config: Config, directory: RunDirectory | None) -> Tensors:
    """The weights before round 0: the network's initialization, or those of `model.weights`, from the copy in
    the run directory if there is one."""
    weights = initialise(shape, config.run.seed)
    if config.model.weights is None:
        return weights
    file = Path(config.model.weights) if directory is None else directory.initial_weights
    return read_weights(file, weights)


def start(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    say: Say = ignore,
) -> Run:
    """Prepare a run without training. Everything is checked before `out` is created."""
    resolved, dataset = resolve(_config(config), say)
    run = Run(resolved, dataset, make_split(resolved, dataset, say))
    run.check()
    if run.rounds < resolved.train.rounds:
        say(f"{resolved.method.name} has a single round with all {resolved.data.devices} devices")
    prune_round, rounds = resolved.method.settings.get("prune_round"), resolved.train.rounds
    if prune_round is not None and prune_round >= rounds:
        say(f"method.prune_round = {prune_round} is not reached in {rounds} rounds: nothing will be pruned")
    if out is not None:
        weights = run.state.weights if resolved.model.weights is not None else None
        run.directory = RunDirectory.create(Path(out), resolved, run.split, weights)
    return run


def begin(config: Config | Mapping[str, Any] | str | Path | None, out: str | Path, say: Say = ignore) -> Run:
    """Start a run or, if `out` contains it already, resume it from its last checkpoint."""
    resolved, _ = resolve(_config(config), ignore)
    if not contains_run(Path(out), resolved):
        return start(resolved, out, say)
    return resume(out, say=say, runtime={key: getattr(resolved.run, key) for key in RUNTIME_KEYS})


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train to the end and return the run, which is also written to the directory `out` if given.

    `config` is a `Config`, a nested dictionary, the path of a TOML file, or None for the defaults.
    """
    run = start(config, out)
    try:
        return run.run(on_round)
    finally:
        run.close()


def resume(
    directory: str | Path,
    workers: int | None = None,
    rounds: int | None = None,
    say: Say = ignore,
    tensorboard: bool | None = None,
    runtime: Mapping[str, Any] | None = None,
) -> Run:
    """Open an interrupted run at its last checkpoint; iterate over it or call `.run()` to continue.

    Only `workers`, `tensorboard`, the other `RUNTIME_KEYS` of [run] (by `runtime`) and a larger number of
    `rounds` may differ from before.
    """
    changed = {"workers": workers, "tensorboard": tensorboard, **(runtime or {})}
    opened = RunDirectory.open(Path(directory))
    try:
        config = stored = opened.config()
        if (stack := legacy_stack_size(opened.path)) > 1:
            say(
                f"this run trained {stack} devices together (train.stack), which is no longer supported: "
                "they now train separately, and results differ from an uninterrupted run by rounding"
            )
        config = config.replace(run={key: value for key, value in changed.items() if value is not None})
        if rounds is not None:
            config = config.replace(train={"rounds": rounds})
        config, dataset = resolve(config, say)
        run = Run(config, dataset, opened.split(len(dataset.train_labels)), opened)
        run.restore(say)
        if rounds is not None and rounds < run.state.round:
            raise FeddumapError(
                f"--rounds {rounds}: {directory} has {run.state.round} rounds already: give a larger number"
            )
        stored_next = config.replace(run={"workers": stored.run.workers})
        if rounds is not None or stored_next.run != stored.run:
            opened.set_config(config)
    except BaseException:
        opened.close()
        raise
    return run


def _config(given: Config | Mapping[str, Any] | str | Path | None) -> Config:
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return Config.parse(given)
    return configuration.load(Path(given) if given is not None else None)
