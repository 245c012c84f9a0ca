"""Process settings for deterministic and fast computation."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# glibc's mallopt parameters (malloc.h)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # the maximum of glibc on 64 bits


def cores() -> int:
    """The number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def retain_freed_memory() -> None:
    """Make glibc keep freed memory: training allocates and frees the same blocks in every step, and returning
    them to the system takes longer than a convolution. Does nothing with other C libraries."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def deterministic() -> Iterator[None]:
    """A context with one thread, flushed denormals and deterministic kernels, so that results are
    bit-identical in this and in worker processes.

    Sums split over threads round differently, so training runs on one thread per process. Denormals are
    flushed because they are slow, and a saturated softmax produces many. The previous settings are restored,
    so the context may be nested."""
    retain_freed_memory()
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
