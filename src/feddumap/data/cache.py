"""The cache of data sets.

A cached set is a folder of .npy files and a manifest. The arrays are memory-mapped, so all worker processes
share one copy of the data; the manifest's digests detect damaged files.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from feddumap.core.messages import CIFAR_INPUT, InputSpec
from feddumap.data import blocks
from feddumap.data.dataset import Arrays, Contents, Dataset, find_problem
from feddumap.errors import FeddumapError
from feddumap.system.atomic_files import write_text
from feddumap.system.json_text import parse_json

MANIFEST, VERIFIED = "manifest.json", "verified.json"
ARRAY_ERRORS = (ValueError, TypeError, EOFError, SyntaxError, TokenError, OverflowError, MemoryError)
"""What numpy raises for a damaged .npy header, which it parses as Python, and for invalid sizes in it."""
OPTIONAL = ("train_users", "test_users")
"""Arrays that a set may lack."""


class FileEntry(BaseModel):
    """The expected shape, type, size and digest of a cached file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The content of manifest.json; `format` changes when older code cannot read the folder. Format 1 had
    images of 3×32×32 only, in files named after them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1, 2]
    name: str
    classes: tuple[str, ...]
    source: str
    files: dict[str, FileEntry]
    input: dict[str, Any] | None = None
    users: tuple[str, ...] = ()

    def file(self, field: str) -> str:
        """The file name of an array."""
        return f"{field.replace('inputs', 'images') if self.format == 1 else field}.npy"


def home() -> Path:
    """The folder for data sets and downloads: FEDDUMAP_HOME, else a folder in the user's cache."""
    chosen = os.environ.get("FEDDUMAP_HOME")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "feddumap"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "feddumap"


def read(folder: Path, verify: bool = True, owner: object = None) -> Dataset:
    """The set cached in `folder`. `verify` also compares every file's sha256 with the manifest or, if the
    file has the size and time stamp of the last verification, a few of its blocks with their digests. `owner`
    is kept alive with the set."""
    manifest = read_manifest(folder)
    known = _read_verified(folder) if verify else None
    digests = blocks.read(folder) if verify else {}
    names = [name for name in Arrays._fields if name not in OPTIONAL or manifest.file(name) in manifest.files]
    arrays = Arrays(**{name: _load(folder, manifest.file(name), manifest, known, digests) for name in names})
    if known is not None and known != _read_verified(folder):
        _write_verified(folder, known)
    try:
        given = InputSpec.from_json(manifest.input) if manifest.input is not None else CIFAR_INPUT
    except (ValueError, TypeError) as error:
        raise _damaged(folder, folder / MANIFEST, f"describes {error}", manifest.name) from None
    problem = find_problem(Contents(arrays, manifest.classes, manifest.source, given, manifest.users))
    if problem:
        raise _damaged(folder, folder, problem, manifest.name)
    return Dataset(manifest.name, manifest.classes, *arrays, manifest.source, given, manifest.users, owner)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a cache folder."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise _damaged(folder, path, f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _damaged(
            folder, path, f"is not a manifest of format 1 or 2 ({where or 'JSON'}: {first['msg']})"
        ) from None


def _read_verified(folder: Path) -> dict[str, list[int]]:
    """Size, modification time and inode of each file when it was last verified."""
    try:
        value = parse_json((folder / VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # verified again
    return value if isinstance(value, dict) else {}


def _write_verified(folder: Path, known: dict[str, list[int]]) -> None:
    with suppress(OSError):  # a read-only cache is verified each time
        write_text(folder / VERIFIED, json.dumps(known) + "\n")


def _load(
    folder: Path, name: str, manifest: Manifest, known: dict[str, list[int]] | None, digests: blocks.Digests
) -> npt.NDArray[Any]:
    path = folder / name
    entry = manifest.files.get(path.name)
    if entry is None:
        raise _damaged(folder, folder / MANIFEST, f"does not list {path.name}", manifest.name)
    try:
        found = path.stat()
        if found.st_size != entry.bytes:
            problem = f"has {found.st_size} bytes, expected {entry.bytes}"
            raise _damaged(folder, path, problem, manifest.name)
        mark = [found.st_size, found.st_mtime_ns, found.st_ino]
        if known is not None and known.get(path.name) != mark:
            if sha256_of(path) != entry.sha256:
                problem = f"is damaged: its sha256 is not the expected {entry.sha256}"
                raise _damaged(folder, path, problem, manifest.name)
            known[path.name] = mark
        elif (block := blocks.sampled_damage(path, digests.get(path.name, []))) is not None:
            problem = f"is damaged: block {block} of {len(digests[path.name])} is not as it was written"
            raise _damaged(folder, path, problem, manifest.name)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _damaged(folder, path, f"cannot be read ({reason})", manifest.name) from None
    except ARRAY_ERRORS as error:
        raise _damaged(folder, path, f"is not a .npy array ({error})", manifest.name) from None
    if not isinstance(array, np.memmap) or (array.shape, str(array.dtype)) != (entry.shape, entry.dtype):
        problem = f"is not the expected array {entry.dtype} {entry.shape}"
        raise _damaged(folder, path, problem, manifest.name)
    return array


def _damaged(folder: Path, path: Path, problem: str, name: str | None = None) -> FeddumapError:
    command = f"feddumap data get {name or folder.name}"
    return FeddumapError(f"the cached {path} {problem}: delete the folder {folder} and run `{command}`")


def write(folder: Path, name: str, contents: Contents, replace: bool = False) -> None:
    """Write a set to the cache `folder` atomically.

    If several processes write the same set, the first rename wins and the others discard their copies, unless
    `replace` is set.
    """
    problem = find_problem(contents)
    if problem:
        raise FeddumapError(f"the data set {name} {problem}: nothing was cached")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name[:40]}.", dir=folder.parent) as temporary:
            fresh = Path(temporary) / "new"
            _write_files(fresh, name, contents)
            if replace and folder.exists():
                folder.rename(Path(temporary) / "old")
            try:
                fresh.rename(folder)
            except OSError:
                if not (folder / MANIFEST).exists():  # otherwise another process wrote it first
                    raise
            _sync(folder.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "free some space or set FEDDUMAP_HOME to a folder that can be written"
        raise FeddumapError(f"cannot write the cache {folder} ({reason}): {advice}") from None


def _write_files(folder: Path, name: str, contents: Contents) -> None:
    folder.mkdir()
    files = {}
    for field, array in contents.arrays._asdict().items():
        if array is None:
            continue
        path = folder / f"{field}.npy"
        with path.open("wb") as file:
            np.save(file, np.ascontiguousarray(array), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        size = path.stat().st_size
        files[path.name] = FileEntry(
            shape=array.shape, dtype=str(array.dtype), bytes=size, sha256=sha256_of(path)
        )
    manifest = Manifest(
        format=2,
        name=name,
        classes=contents.classes,
        source=contents.source,
        files=files,
        input=contents.input.to_json(),
        users=contents.users,
    )
    write_blocks(folder, files)
    with (folder / MANIFEST).open("w", encoding="utf-8") as text:
        text.write(manifest.model_dump_json(indent=1) + "\n")
        text.flush()
        os.fsync(text.fileno())
    _sync(folder)


def write_blocks(folder: Path, names: Iterable[str]) -> None:
    """Write the digests of the blocks of these files."""
    write_text(
        folder / blocks.FILE, json.dumps({name: blocks.digests(folder / name) for name in names}) + "\n"
    )


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # makes the rename durable
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
