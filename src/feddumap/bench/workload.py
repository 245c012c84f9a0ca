"""The measured workload: FedAvg on random images, trained by the code of `feddumap train`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from feddumap import run as api
from feddumap.config import Config
from feddumap.data import cache, partition
from feddumap.data.dataset import Arrays, Contents, Dataset
from feddumap.engine.session import Session
from feddumap.system.callbacks import Progress, ignore
from feddumap.system.determinism import cores

CLASSES = tuple("0123456789")
SEED = 777
NEVER = 10**9  # rounds between evaluations


@dataclass(frozen=True)
class Workload:
    """A federation to measure. The defaults are the paper's; `workers` 0 is one per core."""

    model: str = "cnn"
    devices: int = 100
    cohort: int = 10
    samples: int = 400
    epochs: int = 5
    batch: int = 10
    lr: float = 0.1
    workers: int = 0
    kernels: Literal["c", "torch"] | None = None
    method: str = "fedavg"

    @property
    def processes(self) -> int:
        """The number of training processes."""
        return self.workers or min(cores(), self.cohort)

    @property
    def images(self) -> int:
        """Training images of the data set, of which the devices share four fifths."""
        return -(-self.devices * self.samples * 5 // 4)

    def config(self, rounds: int) -> Config:
        """The configuration of a run that is evaluated only after its last round."""
        return Config.parse(
            {
                "data": {
                    "devices": self.devices,
                    "partition": "iid",
                    "server_fraction": 0.0,
                    "augment": False,
                },
                "model": {"name": self.model},
                "method": {"name": self.method},
                "train": {
                    "rounds": rounds,
                    "cohort": self.cohort,
                    "epochs": self.epochs,
                    "batch": self.batch,
                    "lr": self.lr,
                    "kernels": self.kernels,
                },
                "clock": {"train_seconds": 1.0},
                "run": {"seed": SEED, "workers": self.workers, "evaluate_every": NEVER},
            }
        )


@contextmanager
def random_data(images: int) -> Iterator[Dataset]:
    """A data set of random pixels and labels in a temporary folder."""
    rng = np.random.default_rng(SEED)

    def draw(count: int) -> tuple[Any, Any]:
        pixels = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        return pixels, rng.integers(0, len(CLASSES), count)

    with tempfile.TemporaryDirectory(prefix="feddumap-bench-") as temporary:
        folder = Path(temporary) / "random"
        contents = Contents(Arrays(*draw(images), *draw(10)), CLASSES, "random numbers")
        cache.write(folder, "random", contents)
        yield cache.read(folder, verify=False)


@dataclass(frozen=True)
class Times:
    """Seconds of start-up including the first round, and of each later round."""

    startup: float
    rounds: Sequence[float]

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))

    def to_json(self) -> dict[str, Any]:
        """
        >>> Times(9.0, [1.0, 2.0, 3.0, 4.0, 5.0]).to_json()["spread"]
        {'min': 1.0, 'lower_quartile': 2.0, 'upper_quartile': 4.0, 'max': 5.0}
        """
        names = ("min", "lower_quartile", "upper_quartile", "max")
        spread = (float(value) for value in np.percentile(self.rounds, [0, 25, 75, 100]))
        return {
            "seconds_per_round": self.median,
            "spread": dict(zip(names, spread, strict=True)),
            "startup_seconds": self.startup,
        }


def measure(
    workload: Workload,
    data: Dataset,
    rounds: int,
    progress: Progress = ignore,
    at_end: Callable[[], None] = lambda: None,
) -> Times:
    """Time `rounds` rounds after a first one. `at_end` is called while the workers are still running.

    The run is configured with one more round and stopped before it, because the last round is always
    evaluated.
    """
    config = api.complete(workload.config(rounds + 2), data)
    split = partition.split(data.train_labels, len(CLASSES), config.data, SEED)
    run = Session(config, data, split)
    whole = (rounds + 1) * workload.cohort

    def tick(what: str, done: int, _: int) -> None:
        if what == "devices":
            progress("devices", run.state.round * workload.cohort + done, whole)

    for record in run.iterate(tick):
        if record["round"] == rounds:
            at_end()
            break
    walls = [record["wall"] for record in run.records]
    return Times(walls[0], [after - before for before, after in pairwise(walls)])
