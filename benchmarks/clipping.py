"""What clipping costs: CPU time to clip a round's uploads, relative to the training of its devices.

python benchmarks/clipping.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from feddumap import run as api
from feddumap.config import load
from feddumap.core.algorithm import RoundView
from feddumap.core.messages import Upload
from feddumap.engine.rounds import broadcast_of
from feddumap.screening.clipped import NORMS, Clipped
from feddumap.screening.vectors import WEIGHTS
from feddumap.system.determinism import deterministic

COHORT, REPEATS = 10, 20


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(name: str) -> str:
    sets = ("data.name=cifar10", f"model.name={name}", "aggregate.name=clipped", "run.workers=1")
    run = api.start(load(None, sets))
    with deterministic():
        engine = run._engine()
        view = RoundView(run._context(engine), run.state, 0.1, [])
        message = broadcast_of(run.state, run.config)
        (upload,) = engine.train(message, [0])
        assert isinstance(upload, Upload)
        uploads = [replace(upload, device=device) for device in range(COHORT)]
        history = {f"{NORMS}{WEIGHTS}": torch.ones(1, dtype=torch.float64)}
        clip = np.median(
            [seconds(lambda: list(Clipped(history, view).admit(uploads))) for _ in range(REPEATS)]
        )
        train = np.median([seconds(lambda: list(engine.train(message, [0]))) for _ in range(3)])
    return (
        f"{name}: {COHORT} uploads are clipped in {1e3 * clip:.1f} ms, a device trains for "
        f"{1e3 * train:.0f} ms: {clip / (COHORT * train):.2%} of a round"
    )


if __name__ == "__main__":
    for network in ("lenet", "cnn"):
        print(measure(network))
