"""Writing files whole or not at all."""

import os
from pathlib import Path


def write_bytes(path: Path, data: bytes) -> None:
    """Fill a temporary neighbour, force it to the disk, then put it in place of `path`.

    A reader sees the old file or the new one. On an error the neighbour is removed and `path` untouched.
    """
    neighbour = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        neighbour.write_bytes(data)
        sync(neighbour)
        neighbour.replace(path)
    except BaseException:
        neighbour.unlink(missing_ok=True)
        raise
    sync(path.parent)


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
