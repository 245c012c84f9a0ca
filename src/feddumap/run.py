"""Training from Python: `train`, `start` and `resume` give a `Run`; iterating it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from feddumap import config as configuration
from feddumap.config import RUNTIME_KEYS, Config
from feddumap.core import clock
from feddumap.core.algorithm import Cohort, Context, Progress
from feddumap.core.messages import Architecture, ServerState, Tensors
from feddumap.data import partition
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split
from feddumap.data.sources import catalog
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.device.state import InMemoryStore, StateStore
from feddumap.engine.local import Evaluator, LocalCohort
from feddumap.engine.pool import Pool
from feddumap.engine.registry import ENGINES, get_engine
from feddumap.engine.rounds import RoundRecord, initial_state, active_parameters, rounds, take_census
from feddumap.errors import FeddumapError
from feddumap.methods import compose, registry
from feddumap.models import architecture, initialise, network
from feddumap.models.cost import macs
from feddumap.models.weights import read_weights
from feddumap.runs import tensorboard as events
from feddumap.runs.directory import RunDirectory, contains_run, legacy_stack_size
from feddumap.runs.summary import accuracies, is_complete, reached
from feddumap.system.determinism import cores, deterministic
from feddumap.training.evaluation import Score
from feddumap.training.model import choose_kernels
from feddumap.training.samples import Samples

Say = Callable[[str], None]


class Engine(Cohort, Protocol):
    """A cohort that can also score the global model, and is closed at the end."""

    def evaluate(self, state: ServerState) -> Score: ...

    def close(self) -> None: ...


class Run:
    """A training run. Iterate it for the records of the rounds still to do; stop whenever you like.

    `records` holds a dictionary a round, `state` the server's state after the last one. `engine` makes the
    cohort, if it is not to be what `run.engine` names.
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
        start = first_weights(architecture(family, classes), config, directory)
        self.state = initial_state(architecture(family, classes), self._algorithm, start)
        self._shelf = InMemoryStore()
        self._events: events.Events | None = None
        self._wall = 0.0
        self._saved_round = -1

    @property
    def rounds(self) -> int:
        """How many rounds there are to train: one, if the method has but one."""
        return self._algorithm.rounds(self.config)

    @property
    def finished(self) -> bool:
        """Whether all rounds are done or the target was reached."""
        return is_complete(self.records, self.rounds, self.config.run.target)

    def check(self) -> None:
        """Refuse what could only fail later."""
        self._algorithm.check(self.state.architecture)
        self._validation()
        if self._algorithm.server_data and not len(self.split.server):
            raise FeddumapError(
                f"method.name = {self.config.method.name!r} needs images on the server, but "
                f"data.server_fraction = {self.config.data.server_fraction:g} gives none: raise it"
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.iterate()

    def iterate(self, progress: Progress = lambda *_: None) -> Iterator[dict[str, Any]]:
        """Train round after round. `progress(what, done, whole)` is called for each device and survey."""
        self._watch()
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
                with deterministic():  # not around the yield: the caller's own settings hold between two rounds
                    step = next(steps, None)
                if step is None:
                    break
                self._wall = time.perf_counter() - started
                self._keep(*step)
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
        """The run in a few numbers: what summary.json holds."""
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

    # the parts of a run

    def _watch(self) -> None:
        """Begin the event file for TensorBoard, if there is to be one, with the records so far."""
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
        memory: StateStore = self.directory.memory if self.directory is not None else self._shelf
        workers = config.run.workers or min(cores(), len(self._algorithm.choose(config, 0)))
        if workers > 1 and config.run.device == "cpu":
            test_images = len(self.dataset.test_labels)
            return Pool(config, self.dataset.folder, self.split, test_images, workers, memory)
        holdings = SplitHoldings(self.dataset, self.split, config.run.seed)
        desk = Executor(config, holdings, self._algorithm)
        return LocalCohort(desk, Evaluator(self.dataset, config), memory)

    def _context(self, engine: Engine, progress: Progress = lambda *_: None) -> Context:
        data = self.dataset
        server = Samples.take(data.train_images, data.train_labels, self.split.server)
        census = take_census(engine, self.state, self.config, self._algorithm.labels)
        held = self._validation()
        validation = Samples.take(data.train_images, data.train_labels, held) if len(held) else None
        return Context(self.config, server, census, self._clock, progress, validation)

    def _validation(self) -> np.ndarray:
        data, config = self.dataset, self.config
        return partition.validation(
            data.train_labels, len(data.classes), config.data, self.split, config.run.seed
        )

    def _keep(self, state: ServerState, record: RoundRecord) -> None:
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
            self.directory.summarise(self.summary)

    def close(self) -> None:
        """Release the run directory."""
        if self._events is not None:
            self._events.close()
            self._events = None
        if self.directory is not None:
            self.directory.close()
            self.directory = None

    def restore(self, say: Say) -> None:
        """Go back to the newest good checkpoint of the run directory."""
        assert self.directory is not None
        saved, damaged = self.directory.latest()
        if damaged:
            then = f"going on from round {saved.state.round}" if saved else "starting again from round 0"
            say(f"{'; '.join(damaged)}: {then}")
        if saved is not None:
            self.state, self._wall, self._saved_round = saved.state, saved.wall, saved.state.round
        self.records = self.directory.go_back(self.state.round)


def first_weights(shape: Architecture, config: Config, directory: RunDirectory | None) -> Tensors:
    """The weights before round 0: the network's own, or those of `model.weights`, of which a run directory
    keeps a copy."""
    weights = initialise(shape, config.run.seed)
    if config.model.weights is None:
        return weights
    file = Path(config.model.weights) if directory is None else directory.first_weights
    return read_weights(file, weights)


def start(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    say: Say = lambda _: None,
) -> Run:
    """Prepare a run without training yet. Everything that can be wrong is found before `out` is made."""
    resolved, dataset = _resolve(_config(config), say)
    run = Run(resolved, dataset, _split(resolved, dataset, say))
    run.check()
    if run.rounds < resolved.train.rounds:
        say(f"{resolved.method.name} has one round, in which all {resolved.data.devices} devices take part")
    late, rounds = resolved.method.settings.get("prune_round"), resolved.train.rounds
    if late is not None and late >= rounds:
        say(f"method.prune_round = {late} is not reached in {rounds} rounds: nothing will be pruned")
    if out is not None:
        own = run.state.weights if resolved.model.weights is not None else None
        run.directory = RunDirectory.create(Path(out), resolved, run.split, own)
    return run


def begin(
    config: Config | Mapping[str, Any] | str | Path | None, out: str | Path, say: Say = lambda _: None
) -> Run:
    """Start a run or, if `out` holds this one already, go on with it from its last checkpoint."""
    resolved, _ = _resolve(_config(config), lambda _: None)
    if not contains_run(Path(out), resolved):
        return start(resolved, out, say)
    return resume(out, say=say, carried_out={key: getattr(resolved.run, key) for key in RUNTIME_KEYS})


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train to the end and return the run. With `out`, everything is also kept in that directory.

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
    say: Say = lambda _: None,
    tensorboard: bool | None = None,
    carried_out: Mapping[str, Any] | None = None,
) -> Run:
    """Open an interrupted run at its last checkpoint; iterate or `.run()` it to go on.

    `workers`, `tensorboard`, the other keys of [run] that say how it is `carried_out`, and a larger number of
    `rounds` may differ from before; nothing else may.
    """
    other = {"workers": workers, "tensorboard": tensorboard, **(carried_out or {})}
    opened = RunDirectory.open(Path(directory))
    try:
        config = stored = opened.config()
        if (together := legacy_stack_size(opened.path)) > 1:
            say(
                f"this run trained {together} devices as one (train.stack), which no longer exists: from "
                f"here on "
                "they train one by one, and results differ from an uninterrupted run by rounding"
            )
        config = config.replace(run={key: value for key, value in other.items() if value is not None})
        if rounds is not None:
            config = config.replace(train={"rounds": rounds})
        config, dataset = _resolve(config, say)
        run = Run(config, dataset, opened.split(len(dataset.train_labels)), opened)
        run.restore(say)
        if rounds is not None and rounds < run.state.round:
            raise FeddumapError(f"--rounds {rounds}: {directory} has {run.state.round} rounds already")
        lasting = config.replace(run={"workers": stored.run.workers})
        if rounds is not None or lasting.run != stored.run:
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


def _resolve(config: Config, say: Say) -> tuple[Config, Dataset]:
    """Get the data, fill in what depends on it, and check what can be checked before any work."""
    registry.resolve(config.method)
    if config.train.cohort > config.data.devices:
        raise FeddumapError(
            f"train.cohort = {config.train.cohort} is larger than data.devices = {config.data.devices}: "
            "lower the one or raise the other"
        )
    if config.run.device != "cpu":
        _check_device(config.run.device)
    if config.run.tensorboard:
        events.require()
    if config.run.engine in ENGINES:
        get_engine(config.run.engine)
    dataset = catalog.get(config.data.name, say=say)
    return complete(config, dataset, say), dataset


def complete(config: Config, dataset: Dataset, say: Say = lambda _: None) -> Config:
    """Fill in what depends on the method, the model, the data and this installation."""
    shape = architecture(config.model.name, len(dataset.classes))
    data = partition.resolve(config.data, len(dataset.classes))
    kernels = choose_kernels(config.train.kernels, shape, config.run.device, say)
    train = config.train.model_copy(update={"kernels": kernels})
    method = registry.resolve(config.method)
    return config.model_copy(update={"method": method, "data": data, "train": train})


def _check_device(name: str) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FeddumapError(f"run.device = {name!r} cannot be used here ({reason}): use cpu") from None


def _split(config: Config, dataset: Dataset, say: Say) -> Split:
    labels, data = dataset.train_labels, config.data
    made = partition.split(labels, len(dataset.classes), data, config.run.seed)
    wanted, got = partition.requested_server_images(data, len(labels)), len(made.server)
    if got < wanted:
        say(
            f"the server holds {got:,} images instead of the {wanted:,} that data.server_fraction = "
            f"{data.server_fraction} asks for: its {data.server_classes} classes have no more"
        )
    return made
