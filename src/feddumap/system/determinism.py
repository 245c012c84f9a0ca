"""Settings of the process that bits and speed depend on."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# glibc's mallopt parameters (malloc.h)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more on 64 bits


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_memory() -> None:
    """Tell glibc to keep freed blocks: training allocates and frees the same megabytes in every step, and
    giving them back to the system costs more than a convolution. Elsewhere nothing happens: only speed is
    concerned."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def exact_math() -> Iterator[None]:
    """One thread, no denormals, deterministic kernels: equal bits here and in any worker process.

    Sums split over threads round differently, so training always runs on one thread; several processes use
    the cores. Denormals are flushed because a saturated softmax makes many of them and they are slow. What
    was set before is set again afterwards, so that it may be used within itself.
    """
    keep_memory()
    threads = torch.get_num_threads()
    flushing = _flushes_denormals()
    deterministic = torch.backends.cudnn.deterministic
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushing)
        torch.backends.cudnn.deterministic = deterministic


def _flushes_denormals() -> bool:
    return not bool(torch.full((8,), 1e-40).mul(1.0).ne(0).any())
