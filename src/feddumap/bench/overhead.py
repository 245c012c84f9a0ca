"""What a round costs when its devices have nothing to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from feddumap.bench.workload import CLASSES, Progress, Workload, measure, random_data, silent
from feddumap.models import architecture
from feddumap.models.cost import parameters

MODELS = ("lenet", "vgg11")
ECHO = "feddumap.bench.echo:echo"


def bench_overhead(rounds: int, workers: int = 0, progress: Progress = silent) -> dict[str, Any]:
    """Rounds of devices that send back the model they got; 10 of 100 devices."""
    federation = Workload(samples=1, epochs=1, workers=workers, method=ECHO)
    return {
        "devices": federation.devices,
        "cohort": federation.cohort,
        "workers": federation.processes,
        "rounds": rounds,
        "cases": [_case(name, replace(federation, model=name), rounds, progress) for name in MODELS],
    }


def _case(model: str, setting: Workload, rounds: int, progress: Progress) -> dict[str, Any]:
    def show(_: str, done: int, whole: int) -> None:
        progress(model, done, whole)

    with random_data(setting.images) as data:
        times = measure(setting, data, rounds, show)
    return {
        "model": model,
        "parameters": parameters(architecture(model, len(CLASSES))),
        **times.to_json(),
    }
