"""The overhead of a round without local training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from feddumap.bench.workload import CLASSES, Workload, measure, random_data
from feddumap.models import architecture
from feddumap.models.cost import parameters
from feddumap.system.callbacks import Progress, ignore

MODELS = ("lenet", "vgg11")
ECHO = "feddumap.bench.echo:echo"


def bench_overhead(rounds: int, workers: int = 0, progress: Progress = ignore) -> dict[str, Any]:
    """Time rounds in which 10 of 100 devices return the received model unchanged."""
    federation = Workload(samples=1, epochs=1, workers=workers, method=ECHO)
    return {
        "devices": federation.devices,
        "cohort": federation.cohort,
        "workers": federation.processes,
        "rounds": rounds,
        "cases": [_case(name, replace(federation, model=name), rounds, progress) for name in MODELS],
    }


def _case(model: str, workload: Workload, rounds: int, progress: Progress) -> dict[str, Any]:
    def show(_: str, done: int, whole: int) -> None:
        progress(model, done, whole)

    with random_data(workload.images) as data:
        times = measure(workload, data, rounds, show)
    return {
        "model": model,
        "parameters": parameters(architecture(model, len(CLASSES))),
        **times.to_json(),
    }
