"""Seconds a round, and how near that is to what the machine's matrix products would allow."""

from __future__ import annotations

from typing import Any

from feddumap.bench import matrix
from feddumap.bench.workload import CLASSES, Progress, Workload, measure, random_data, silent
from feddumap.models import architecture
from feddumap.models.cost import macs
from feddumap.training.kernels.library import described
from feddumap.training.model import choose_kernels

PASSES = 3  # forward, and backward for the activations and for the weights


def bench_rounds(setting: Workload, rounds: int, progress: Progress = silent) -> dict[str, Any]:
    """Measure a federation.

    `share_of_matrix_speed` is the multiply-adds of a round's convolutions and linear layers, forward and
    backward, over what matrix products in as many processes would do in its time, at the mean of their speeds
    before and after.
    """
    shape = architecture(setting.model, len(CLASSES))  # a wrong name is told before any work
    with random_data(setting.images) as data, matrix.matrix_throughput(setting.processes) as gauge:
        before = gauge()
        times = measure(setting, data, rounds, progress)
        speed = (before + gauge()) / 2
    samples = setting.cohort * setting.samples * setting.epochs
    work = PASSES * macs(shape) * samples
    return {
        "model": setting.model,
        "devices": setting.devices,
        "cohort": setting.cohort,
        "samples_per_device": setting.samples,
        "epochs": setting.epochs,
        "batch": setting.batch,
        "workers": setting.processes,
        "kernels": described(choose_kernels(setting.kernels, shape, "cpu", lambda _: None)),
        "rounds": rounds,
        **times.to_json(),
        "samples_per_round": samples,
        "samples_per_second": samples / times.median,
        "multiply_adds_per_round": work,
        "matrix_multiply_adds_per_second": speed,
        "share_of_matrix_speed": work / (speed * times.median),
    }
