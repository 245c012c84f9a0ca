"""Seconds per round, and the share of the machine's matrix product throughput that is reached."""

from __future__ import annotations

from typing import Any

from feddumap.bench import matrix
from feddumap.bench.workload import CLASSES, Workload, measure, random_data
from feddumap.models import architecture
from feddumap.models.cost import macs
from feddumap.system.callbacks import Progress, ignore
from feddumap.training.backends import choose_kernels
from feddumap.training.kernels.loader import described

PASSES = 3  # forward, backward for activations, backward for weights


def bench_rounds(workload: Workload, rounds: int, progress: Progress = ignore) -> dict[str, Any]:
    """Time the rounds of a workload.

    `share_of_matrix_speed` is the multiply-adds of a round's convolutions and linear layers, forward and
    backward, divided by those that matrix products in as many processes would do in the same time. The matrix
    throughput is the mean of measurements before and after.
    """
    shape = architecture(workload.model, len(CLASSES))  # an unknown name fails early
    with random_data(workload.images) as data, matrix.matrix_throughput(workload.processes) as throughput:
        before = throughput()
        times = measure(workload, data, rounds, progress)
        speed = (before + throughput()) / 2
    samples = workload.cohort * workload.samples * workload.epochs
    work = PASSES * macs(shape) * samples
    return {
        "model": workload.model,
        "devices": workload.devices,
        "cohort": workload.cohort,
        "samples_per_device": workload.samples,
        "epochs": workload.epochs,
        "batch": workload.batch,
        "workers": workload.processes,
        "kernels": described(choose_kernels(workload.kernels, shape, "cpu", lambda _: None)),
        "rounds": rounds,
        **times.to_json(),
        "samples_per_round": samples,
        "samples_per_second": samples / times.median,
        "multiply_adds_per_round": work,
        "matrix_multiply_adds_per_second": speed,
        "share_of_matrix_speed": work / (speed * times.median),
    }
