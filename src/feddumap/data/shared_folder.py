"""Folders in shared memory that live as long as the process that made them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from feddumap.errors import FeddumapError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
PREFIX = "feddumap-data-"
LOCK = "lock"
SPARE = 1 << 20  # bytes for the manifest and the headers


def make_folder(size: int) -> tuple[Path, int]:
    """A new folder for `size` bytes, in shared memory if they fit there, else in the temporary folder, and
    the descriptor of its lock; `remove_folder` removes it.

    Folders of processes that were killed are removed.
    """
    places = [place for place in (SHARED_MEMORY, Path(tempfile.gettempdir())) if _has_space(place, size)]
    if not places:
        raise FeddumapError(
            f"neither {SHARED_MEMORY} nor {tempfile.gettempdir()} has {size / 1e9:.2f} GB left for the data: "
            "free some space or set TMPDIR"
        )
    _sweep(places[0])
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=places[0]))
    # locked before it has its name, so that no other process takes it for a forgotten one
    descriptor = os.open(folder / f".{LOCK}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # held until this process and those forked from it exit
    (folder / f".{LOCK}").rename(folder / LOCK)
    return folder, descriptor


def remove_folder(folder: Path, lock: int, process: int) -> None:
    """Remove a folder, if this is the process that made it and not one forked from it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _has_space(place: Path, size: int) -> bool:
    return os.access(place, os.W_OK) and shutil.disk_usage(place).free > size + SPARE


def _sweep(place: Path) -> None:
    """Remove the folders whose lock nobody holds."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
