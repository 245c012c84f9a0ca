"""Writes of files, whole or not at all. Every file of a run directory is written by these functions, through
the `os` of this module, which tests replace to make single operations fail."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.tmp")


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which is synced and replaces `path` when the block ends.

    Readers see the old file or the new one. On an error the temporary file is deleted and `path` unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)  # noqa: PTH105 (the `os` of this module, as below)
    except BaseException:
        remove(temporary)
        raise
    sync(path.parent)


def write_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file of bytes atomically; with `mode` it has these permissions from the start."""
    with atomic_replacement(path) as temporary:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if mode is None else mode)
        try:
            _write(fd, data, temporary)
        finally:
            os.close(fd)


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode(), mode)


def append(path: Path, data: bytes, at: int) -> None:
    """Append to a file, all of the data or nothing: what was written is taken back if writing fails.

    `at` is how long the file should be so far. A longer one ends in what an earlier failure left, which is
    cut off; a shorter one is an error.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(fd).st_size
        if size < at:
            raise OSError(f"{path} has {size} bytes instead of {at}: it was changed by another program")
        if size > at:
            os.ftruncate(fd, at)
        try:
            _write(fd, data, path)
        except BaseException:
            with suppress(OSError):  # then the next append or resume cuts it off
                os.ftruncate(fd, at)
            raise
    finally:
        os.close(fd)


def _write(fd: int, data: bytes, path: Path) -> None:
    """Write all bytes, in one system call unless that writes only some of them. Errors name the path."""
    rest = memoryview(data)
    while len(rest):
        try:
            written = os.write(fd, rest)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        rest = rest[written:]


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Delete a file if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


def make_folder(path: Path) -> None:
    """Make a folder and those above it, if they do not exist."""
    os.makedirs(path, exist_ok=True)  # noqa: PTH103


def leftovers(folder: Path, names: str, locked: bool = False) -> list[Path]:
    """The temporary files of processes that were killed while they wrote a file of `folder` whose name
    matches the pattern `names`. `locked`: no other process writes there; otherwise files of a process id that
    is in use are left out."""
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        match = TEMPORARY.fullmatch(path.name)
        if match and re.fullmatch(names, match["name"]) and (locked or not _is_writing(int(match["pid"]))):
            found.append(path)
    return found


def _is_writing(pid: int) -> bool:
    """Whether another process has this id; a process does not look for leftovers while it writes."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True
