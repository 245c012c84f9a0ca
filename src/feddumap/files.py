"""Writing files whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary neighbour, force it to the disk, then put it in place of `path`.

    A reader sees the old file or the new one. On an error the neighbour is removed and `path` untouched.
    """
    neighbour = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(neighbour)
        sync(neighbour)
        neighbour.replace(path)
    except BaseException:
        neighbour.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """A whole text file."""
    write_whole(path, lambda neighbour: _write(neighbour, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
