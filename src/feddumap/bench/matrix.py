"""What this machine can do at best: fp32 matrix products, one thread in each of several processes at once."""

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
TOGETHER, REPEATS = 3, 10  # products timed in one go, and how often


@contextmanager
def matrix_throughput(processes: int) -> Iterator[Callable[[], float]]:
    """Yields a function that measures: multiply-adds a second of all the processes together.

    They are started once and wait in between, so that the speed can be had just before and just after the
    work that it is compared with: on a machine shared with others it changes within minutes.
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
        raise RuntimeError("a process that multiplies matrices ended early")
    return line


def main() -> None:
    """One of the processes: for each line it reads, it measures and prints multiply-adds a second."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.rand(SIDE, SIDE, generator=generator) for _ in range(2))
    product = torch.empty(SIDE, SIDE)
    timer = timeit.Timer(lambda: torch.mm(left, right, out=product))
    timer.timeit(TOGETHER)
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = statistics.median(timer.repeat(REPEATS, TOGETHER))
        print(TOGETHER * SIDE**3 / seconds, flush=True)


if __name__ == "__main__":
    main()
