"""The cohort of a simulation on this machine: devices train in this process, or in worker processes."""

from __future__ import annotations

from typing import Protocol

from feddumap.config import Config
from feddumap.core.algorithm import Algorithm, Cohort
from feddumap.core.messages import ServerState
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.device.state import StateStore
from feddumap.engine import objects
from feddumap.engine.forkserver import ForkServer, ForkServerDiedError
from feddumap.engine.local import Evaluator, LocalCohort
from feddumap.engine.pool import Pool
from feddumap.system.callbacks import Say
from feddumap.system.determinism import cores
from feddumap.training.evaluation import Score


class Engine(Cohort, Protocol):
    """A cohort that also evaluates the global model and is closed at the end."""

    def evaluate(self, state: ServerState) -> Score: ...

    def close(self) -> None: ...


def open_cohort(
    config: Config, dataset: Dataset, split: Split, algorithm: Algorithm, states: StateStore, say: Say
) -> Engine:
    """The cohort for `run.workers` processes; by default as many as there are cores and chosen devices."""
    workers = config.run.workers or max(1, min(cores(), len(algorithm.choose(config, 0))))
    server: ForkServer | None = None
    if workers > 1 and config.run.device == "cpu" and objects.used(config):
        try:
            server = ForkServer(forked=True, tried=True)
        except ForkServerDiedError as error:
            say(f"worker processes cannot be forked here ({error}): training in one process")
            workers = 1
    if workers > 1 and config.run.device == "cpu":
        return Pool(config, dataset.folder, split, len(dataset.test_labels), workers, states, server, say)
    executor = Executor(config, SplitHoldings(dataset, split, config.run.seed), algorithm)
    return LocalCohort(executor, Evaluator.of(dataset, split, config), states)
