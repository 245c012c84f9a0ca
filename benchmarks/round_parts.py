"""What a round of FedDU-S consists of: the devices' training, the server's own, and the evaluation.

    python benchmarks/round_parts.py [--model cnn] [--rounds 3] [--epochs 5]

Trains the paper's setting (10 of 100 devices, images on the server too) on random images with 10,000 test
images, and prints the median seconds of each part, a step's milliseconds on a device and on the server, and
the evaluation's share. A device's step is the time a worker process spends on it. The server's own scoring
(its accuracy before its training, its loss afterwards) is a part of its own.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from feddumap import run as api
from feddumap.data import cache, partition
from feddumap.data.dataset import Arrays, Contents, Dataset
from feddumap.engine.session import Session
from feddumap.system.determinism import cores

TRAIN, TEST = 50_000, 10_000


def random_data(folder: Path) -> Dataset:
    rng = np.random.default_rng(0)
    sets = [(rng.integers(0, 256, (n, 32, 32, 3), np.uint8), rng.integers(0, 10, n)) for n in (TRAIN, TEST)]
    arrays = Arrays(*(array for pair in sets for array in pair))
    cache.write(folder, "random", Contents(arrays, tuple("0123456789"), "random numbers"))
    return cache.read(folder, verify=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to time, after a first one")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    spent: dict[str, list[float]] = {"devices": [], "server": [], "scoring": [], "evaluation": []}
    with tempfile.TemporaryDirectory() as folder:
        data = random_data(Path(folder) / "random")
        config = api.Config.parse(
            {
                "data": {"name": "digits", "partition": "iid"},
                "model": {"name": options.model},
                "method": {"name": "feddu-s"},  # whose server trains whatever its accuracy
                "train": {"rounds": options.rounds + 1, "epochs": options.epochs},
            }
        )
        config = api.complete(config, data)
        split = partition.split(data.train_labels, 10, config.data, config.run.seed)
        feddu = import_module("feddumap.methods.feddu")
        feddu.train_copy = timed(feddu.train_copy, spent["server"])  # type: ignore[attr-defined]
        run = Session(config, data, split)
        watch(run, spent)
        for _ in run:
            pass
    middle = {part: statistics.median(seconds[1:]) for part, seconds in spent.items()}
    whole = sum(middle.values())
    workers = min(cores(), config.train.cohort)
    epochs, batch = config.train.epochs, config.train.batch
    own = config.train.cohort * epochs * -(-len(split.device(0)) // batch) / workers
    server = epochs * -(-len(split.server) // batch)
    print(f"{options.model}: a round {whole:.2f} s")
    for part, seconds in middle.items():
        print(f"  {part:10} {seconds:6.2f} s  {seconds / whole:5.1%}")
    print(f"  evaluation / devices' training: {middle['evaluation'] / middle['devices']:.1%}")
    print(f"  a step: device {1000 * middle['devices'] / own:.2f} ms, ", end="")
    print(f"server {1000 * middle['server'] / server:.2f} ms")


def timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        found = function(*arguments)
        times.append(time.perf_counter() - began)
        return found

    return call


def watch(run: Session, spent: dict[str, list[float]]) -> None:
    """Note how long each part takes."""
    server, build = run._algorithm.server, run._engine
    whole: list[float] = []
    apply = timed(server.apply, whole)

    def apply_and_note(*arguments: Any) -> Any:
        found = apply(*arguments)
        spent["scoring"].append(whole[-1] - spent["server"][-1])
        return found

    def engine() -> Any:
        made = build()
        train = made.train

        def trained(*arguments: Any) -> Iterator[Any]:
            began = time.perf_counter()
            yield from train(*arguments)
            spent["devices"].append(time.perf_counter() - began)

        made.train = trained  # type: ignore[method-assign]
        made.evaluate = timed(made.evaluate, spent["evaluation"])  # type: ignore[method-assign]
        return made

    run._algorithm = replace(run._algorithm, server=replace(server, apply=apply_and_note))
    run._engine = engine  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
