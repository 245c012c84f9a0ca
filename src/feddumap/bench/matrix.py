"""Peak throughput of this machine: float32 matrix products in parallel single-threaded processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from feddumap.system import children

SIDE = 1024
PRODUCTS, REPEATS = 3, 10  # products per measurement, and measurements


@contextmanager
def matrix_throughput(processes: int) -> Iterator[Callable[[], float]]:
    """Yields a function that measures the total multiply-adds per second of all processes.

    The processes are started once and wait between measurements, so that throughput can be measured
    immediately before and after a workload: on a shared machine it changes within minutes.
    """
    started = [children.start("feddumap.bench.matrix") for _ in range(processes)]

    def measure() -> float:
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return sum(float(_line(process)) for process in started)

    try:
        for process in started:
            _line(process)  # ready
        yield measure
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a matrix product process exited early")
    return line


def main() -> None:
    """Entry point of a process: for each input line, measure and print multiply-adds per second."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.rand(SIDE, SIDE, generator=generator) for _ in range(2))
    product = torch.empty(SIDE, SIDE)
    timer = timeit.Timer(lambda: torch.mm(left, right, out=product))
    timer.timeit(PRODUCTS)
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = statistics.median(timer.repeat(REPEATS, PRODUCTS))
        print(PRODUCTS * SIDE**3 / seconds, flush=True)


if __name__ == "__main__":
    main()
