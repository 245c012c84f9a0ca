"""The user's data sets: which reader a name means, the keys that it takes, and how its cache is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from feddumap.config import DataConfig
from feddumap.data.dataset import Contents
from feddumap.data.sources import folder, hub, npz, tables
from feddumap.errors import FeddumapError, show
from feddumap.system.callbacks import Say

READING = (
    "kind",
    "input",
    "label",
    "user",
    "size",
    "length",
    "vocabulary",
    "test",
    "test_fraction",
)
"""The keys of [data] that say how a data set is read; all are unset by default."""


@dataclass(frozen=True)
class Source:
    """A user's data set: `form` names its kind in errors, `prefix` its folders in the cache."""

    form: str
    prefix: str
    keys: tuple[str, ...]
    digest: Callable[[], str]
    read: Callable[[Say], Contents]

    def cache_name(self, data: DataConfig) -> str:
        """Depends on the content and on every key that influences how it is read."""
        given = {key: value for key in READING if (value := getattr(data, key)) is not None}
        identity = json.dumps([self.digest(), given], sort_keys=True)
        return f"{self.prefix}-{hashlib.sha256(identity.encode()).hexdigest()}"


def find(data: DataConfig) -> Source | None:
    """The source that `data.name` means if it is a file, a folder or `hub:`; its keys are checked."""
    name = data.name
    path = Path(name).expanduser()
    keys: tuple[str, ...]
    tests = [Path(data.test).expanduser()] if data.test is not None else []
    if name.startswith(hub.PREFIX):
        place = hub.local(name)
        digest = (lambda: folder_digest([place])) if place is not None else (lambda: name)
        found = Source("a hub data set", "hub", READING, digest, lambda say: hub.from_hub(name, data, say))
    elif path.suffix == ".npz":
        keys = ("kind", "vocabulary", "test_fraction")
        found = Source(
            "an .npz file", "npz", keys, lambda: file_digest([path]), lambda say: npz.from_npz(path, data)
        )
    elif path.suffix in tables.ENDINGS:
        found = Source(
            "a table",
            "table",
            READING,
            lambda: file_digest([path, *tests]),
            lambda say: tables.from_table(path, data, say),
        )
    elif path.is_dir():
        keys = ("kind", "size", "test", "test_fraction")
        found = Source(
            "a folder of images",
            "folder",
            keys,
            lambda: folder_digest([path, *tests]),
            lambda say: folder.from_folder(path, data, say),
        )
    else:
        return None
    check_keys(data, found.keys, f"{name} is {found.form}")
    return found


def check_keys(data: DataConfig, allowed: Iterable[str], subject: str) -> None:
    """Refuse reading keys that would have no effect."""
    for key in READING:
        value = getattr(data, key)
        if value is not None and key not in allowed:
            raise FeddumapError(f"data.{key} = {value!r}: {subject}, for which it has no meaning; remove it")
    if data.test is not None and data.test_fraction is not None:
        raise FeddumapError(
            f"data.test_fraction = {data.test_fraction}: data.test = {data.test!r} is the test part; remove "
            "one of them"
        )


def missing(path: Path) -> str:
    """That there is nothing at a path, with the folder in which a relative one was looked for."""
    return f"no file or folder {show(str(path))}" + ("" if path.is_absolute() else f" in {Path.cwd()}")


def file_digest(paths: Iterable[Path]) -> str:
    """SHA-256 of the files' contents."""
    total = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        except FileNotFoundError:
            raise FeddumapError(f"cannot read the data set: {missing(path)}") from None
        except OSError as error:
            raise FeddumapError(f"cannot read the data set {path}: {error.strerror}") from None
    return total.hexdigest()


def folder_digest(paths: Iterable[Path]) -> str:
    """SHA-256 of the relative names, sizes and contents of all files in folders."""
    total = hashlib.sha256()
    for path in paths:
        try:
            sizes = {file: file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()}
        except OSError as error:
            raise FeddumapError(f"cannot read the data set {path}: {error.strerror}") from None
        for file, size in sizes.items():
            entry = f"{file.relative_to(path)}\0{size}\0{file_digest([file])}\n"
            total.update(entry.encode("utf-8", "surrogateescape"))
        total.update(b"\0")
    return total.hexdigest()
