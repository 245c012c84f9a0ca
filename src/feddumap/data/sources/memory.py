"""Refuses data that would not fit into memory, or that a small file could only hold to exhaust it, before any
of it is decompressed."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from feddumap.errors import FeddumapError

ALWAYS = 256 << 20  # bytes that any file may become
RATIO = 100  # times its own size that a larger one may become
ALWAYS_ROWS = 100_000  # rows that any table may have; a larger one needs a byte for each

ADVICE = "store it with less compression if it is sound"


def available_memory() -> int:
    """Bytes that this process can still get: what the machine has free, within the process's own limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration, IndexError):  # other systems than Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return free if limit == resource.RLIM_INFINITY else min(free, limit)


def require_memory(size: int, origin: str, stored: int | None = None, advice: str = ADVICE) -> None:
    """Raise an error if `size` bytes, as a file declares them, are more than the memory available or, for a
    file of `stored` bytes, more than such a file is expected to hold."""
    memory = available_memory()
    if size > memory:
        raise FeddumapError(
            f"{origin} declares {_amount(size)} of data, but this machine has {_amount(memory)} of memory "
            "available: use a smaller data set"
        )
    if stored is not None and size > max(ALWAYS, RATIO * stored):
        raise FeddumapError(
            f"{origin} declares {_amount(size)} of data in {_amount(stored)}, more than {RATIO} times as "
            f"much (files of up to {_amount(ALWAYS)} of data are always read): {advice}"
        )


def require_rows(rows: int, origin: str, stored: int) -> None:
    """Raise an error if a table declares more rows than its file has bytes."""
    if rows > max(ALWAYS_ROWS, stored):
        raise FeddumapError(
            f"{origin} declares {rows:,} rows in {_amount(stored)}, less than a byte for each: use a file "
            "with data of its own in each row"
        )


def _amount(size: int) -> str:
    """
    >>> _amount(4_600_000_000), _amount(4_100_000), _amount(900)
    ('4.6 GB', '4.1 MB', '0.9 KB')
    """
    for factor, unit in ((1e9, "GB"), (1e6, "MB")):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 1e3:,.1f} KB"
