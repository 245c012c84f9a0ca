"""Checks a cached data set, or all of a cache, byte by byte; `feddumap verify` prints what it finds."""

from __future__ import annotations

import re
from pathlib import Path

from feddumap.data import blocks, cache
from feddumap.data.cache import MANIFEST, Manifest
from feddumap.data.dataset import Arrays
from feddumap.errors import FeddumapError
from feddumap.system.findings import Finding


def is_cache(path: Path) -> bool:
    """Whether a folder is a cached data set, or a folder of them."""
    return (path / MANIFEST).is_file() or any(path.glob(f"*/{MANIFEST}"))


def verify(path: Path, repair: bool = True) -> list[Finding]:
    """The state of each file of a cached set, or of the sets in a folder, compared with the digests of the
    manifest. With `repair`, missing digests of blocks (`feddumap.data.blocks`) are made from sound files."""
    if (path / MANIFEST).is_file():
        return _verify_set(path, repair)
    folders = sorted(found.parent for found in path.glob(f"*/{MANIFEST}"))
    if not folders:
        raise FeddumapError(f"{path} is not a data cache (it has no {MANIFEST}): give the folder of a set")
    left = [
        Finding(str(entry), "leftover", "of a process that was interrupted while it wrote a set: delete it")
        for entry in sorted(path.iterdir())
        if entry.is_dir() and re.fullmatch(r"\..+\.\w{8}", entry.name)
    ]
    return [finding for folder in folders for finding in _verify_set(folder, repair)] + left


def _verify_set(folder: Path, repair: bool) -> list[Finding]:
    try:
        manifest = cache.read_manifest(folder)
    except FeddumapError as error:
        return [Finding(str(folder / MANIFEST), "damaged", str(error))]
    known = blocks.read(folder)
    found = [_verify_file(folder, name, manifest, known.get(name)) for name in manifest.files]
    expected = {manifest.file(field) for field in Arrays._fields[:4]}
    found += [
        Finding(str(folder / name), "damaged", f"{MANIFEST} does not list it: {_advice(folder, manifest)}")
        for name in sorted(expected - manifest.files.keys())
    ]
    sound = all(finding.state == "ok" for finding in found)
    if repair and sound and _outdated(folder, manifest, known):
        found.append(_renew(folder, manifest))
    found += [
        Finding(str(entry), "leftover", "of a process that was interrupted while it wrote: delete it")
        for entry in sorted(folder.glob(".*.tmp"))
    ]
    return found


def _verify_file(folder: Path, name: str, manifest: Manifest, known: list[str] | None) -> Finding:
    path, entry = folder / name, manifest.files[name]
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            problem = f"it has {size} bytes, expected {entry.bytes}"
        elif cache.sha256_of(path) == entry.sha256:
            return Finding(str(path), "ok", f"{size} bytes")
        else:
            wrong = blocks.damaged(path, known) if known else []
            where = f" (block {wrong[0]} of {len(known or [])}, and {len(wrong) - 1} others)" if wrong else ""
            problem = f"its content is not what was written{where}"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
    return Finding(str(path), "damaged", f"{problem}: {_advice(folder, manifest)}")


def _advice(folder: Path, manifest: Manifest) -> str:
    return f"delete the folder {folder} and run `feddumap data get {manifest.name}`"


def _outdated(folder: Path, manifest: Manifest, known: blocks.Digests) -> bool:
    return any(known.get(name) != blocks.digests(folder / name) for name in manifest.files)


def _renew(folder: Path, manifest: Manifest) -> Finding:
    path = folder / blocks.FILE
    try:
        cache.write_blocks(folder, manifest.files)
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(str(path), "damaged", f"the digests of blocks cannot be written ({reason})")
    return Finding(str(path), "recovered", "the digests of blocks were missing or damaged and were made anew")
