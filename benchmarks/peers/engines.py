"""How each engine is started for a task, and what its output says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from feddumap import __version__
from feddumap.data import cache
from feddumap.data.dataset import Arrays, Contents

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
ENGINES = ("ours", "flower", "pfl", "pfl2")
EMPTY_MODELS = ("lenet", "vgg11")
EMPTY_ROUNDS = 20
NEVER = 10**9

Seconds = dict[tuple[str, str], float]
"""By task and model."""


@dataclass(frozen=True)
class Job:
    """A process to start, and the (task, model) pairs that it gives the seconds of."""

    engine: str
    gives: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        tasks, models = (" and ".join(dict.fromkeys(names)) for names in zip(*self.gives, strict=True))
        return f"{self.engine}, {tasks}, {models}"


@dataclass(frozen=True)
class Bench:
    """`python` has the peers installed; `folder` is for temporary files."""

    python: Path
    rounds: int
    epochs: int
    samples: int
    folder: Path

    def measure(self, job: Job) -> Seconds:
        task, model = job.gives[0]
        match job.engine, task:
            case "ours", "rounds":
                order = ("--model", model, "--samples", str(self.samples), *self._counts())
                found = json.loads(self._ours("rounds", *order))
                return {(task, model): found["seconds_per_round"]}
            case "ours", "empty":
                found = json.loads(self._ours("overhead", "--rounds", str(EMPTY_ROUNDS)))
                return {("empty", case["model"]): case["seconds_per_round"] for case in found["cases"]}
            case "ours", _:
                return {(task, model): self._first_round(model)}
            case "flower", "empty":
                order = ("--model", model, "--rounds", str(EMPTY_ROUNDS), "--empty")
                return {(task, model): _median(self._peer("flower_rounds.py", *order))}
            case "flower", _:
                return _both(model, self._peer("flower_rounds.py", "--model", model, *self._counts()))
            case "pfl", _:
                return _both(model, self._peer("pfl_rounds.py", "--model", model, *self._counts()))
            case _:
                torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
                order = ("--model", model, *self._counts())
                return _both(model, self._peer(*torchrun, str(HERE / "pfl_rounds.py"), *order))

    def _counts(self) -> tuple[str, ...]:
        return "--rounds", str(self.rounds), "--epochs", str(self.epochs)

    def _ours(self, *arguments: str) -> str:
        return _run([sys.executable, "-m", "feddumap", "bench", *arguments, "--json"], dict(os.environ))

    def _peer(self, *arguments: str) -> dict[str, Any]:
        order = [str(HERE / part) if part.endswith("_rounds.py") else part for part in arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PEERS_SPAWNED": str(time.time()),
            "PEERS_SAMPLES": str(self.samples),
        }
        return _last_line(_run([str(self.python), *order], environment))

    def _first_round(self, model: str) -> float:
        """Seconds from the command `feddumap train` to the line about its first round, on cached data."""
        home = self._home()
        settings = {
            "data.name": "cifar10",
            "data.partition": "iid",
            "data.server_fraction": "0.0",
            "data.augment": "false",
            "model.name": model,
            "train.epochs": str(self.epochs),
            "run.evaluate_every": str(NEVER),
        }
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        out = self.folder / f"run-{time.time_ns()}"
        began = time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "feddumap", "train", *sets, "--out", str(out)],
            env={**os.environ, "FEDDUMAP_HOME": str(home), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        try:
            if not any(line.startswith("round 1/") for line in process.stdout):
                sys.exit("feddumap train ended before its first round")
            return time.time() - began
        finally:
            process.terminate()
            process.communicate()

    def _home(self) -> Path:
        """A home of feddumap's with random images where CIFAR-10 would be cached: the same size and path."""
        home = self.folder / "home"
        if not home.exists():
            rng = np.random.default_rng(0)
            train, test = ((count, 32, 32, 3) for count in (50_000, 10_000))
            arrays = Arrays(
                rng.integers(0, 256, train, dtype=np.uint8),
                rng.integers(0, 10, train[0]),
                rng.integers(0, 256, test, dtype=np.uint8),
                rng.integers(0, 10, test[0]),
            )
            names = tuple(str(number) for number in range(10))
            cache.write(home / "data" / "cifar10", "cifar10", Contents(arrays, names, "random numbers"))
            cache.read(home / "data" / "cifar10")  # verified, as it is after a first use
        return home


def versions(python: Path) -> dict[str, str]:
    """What is compared."""
    code = "import importlib.metadata as m; print(m.version('flwr'), m.version('pfl'), m.version('torch'))"
    flower, pfl, torch = _run([str(python), "-c", code], dict(os.environ)).split()
    return {"feddumap": __version__, "flwr": flower, "pfl": pfl, "torch": torch}


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def _last_line(output: str) -> dict[str, Any]:
    """The line of JSON at the end; libraries print before it."""
    found: dict[str, Any] = json.loads(
        next(line for line in reversed(output.splitlines()) if line.startswith("{"))
    )
    return found


def _median(found: dict[str, Any]) -> float:
    return float(np.median(found["round_seconds"]))


def _both(model: str, found: dict[str, Any]) -> Seconds:
    return {("rounds", model): _median(found), ("start", model): found["startup_seconds"]}
