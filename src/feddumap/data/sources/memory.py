"""Refuses data that would not fit into memory, before any of it is decompressed."""

from __future__ import annotations

import os

from feddumap.errors import FeddumapError


def require_memory(size: int, origin: str) -> None:
    """Raise an error if `size` bytes, as a file declares them, are more than this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise FeddumapError(
            f"{origin} declares {size / 1e9:,.1f} GB of data, but this machine has {memory / 1e9:,.1f} GB of "
            "memory: use a smaller data set"
        )
