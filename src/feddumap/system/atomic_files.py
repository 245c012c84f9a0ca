"""Writing files whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary neighbour to fill: forced to the disk and put in place of `path` when the block ends.

    A reader sees the old file or the new one. On an error the neighbour is removed and `path` untouched.
    """
    neighbour = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield neighbour
        sync(neighbour)
        neighbour.replace(path)
    except BaseException:
        neighbour.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """A whole file of bytes."""
    with replacing(path) as neighbour:
        neighbour.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """A whole text file."""
    write_bytes(path, text.encode())


def sync(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
