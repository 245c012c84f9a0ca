"""Atomic writes of files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which is synced and replaces `path` when the block ends.

    Readers see the old file or the new one. On an error the temporary file is deleted and `path` unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file of bytes atomically; with `mode` it has these permissions from the start."""
    with atomic_replacement(path) as temporary:
        if mode is not None:
            temporary.touch(mode)
            temporary.chmod(mode)
        temporary.write_bytes(data)


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode(), mode)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
