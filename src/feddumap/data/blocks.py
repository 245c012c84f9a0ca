"""Digests of the blocks of a cached set's files: a sample of them is checked at every load, which finds files
that changed on disk without a change of their time stamps."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from feddumap.system.json_text import parse_json

FILE = "blocks.json"
BLOCK = 1 << 18  # bytes
SAMPLE = 4  # blocks of each file, at every load

Digests = dict[str, list[str]]


def digests(path: Path) -> list[str]:
    """The digest of each block of a file, in order."""
    with path.open("rb") as file:
        return [_digest(data) for data in iter(lambda: file.read(BLOCK), b"")]


def read(folder: Path) -> Digests:
    """The digests of a cache folder, by file name; empty for folders of versions without them."""
    try:
        value = parse_json((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return {}  # `feddumap.data.cache_check` makes them anew
    entries = value.items() if isinstance(value, dict) else ()
    return {
        name: found
        for name, found in entries
        if isinstance(found, list) and all(isinstance(each, str) for each in found)
    }


def sampled_damage(path: Path, expected: list[str]) -> int | None:
    """The first of a few randomly chosen blocks that has another digest; None if there is none."""
    chosen = sorted(secrets.SystemRandom().sample(range(len(expected)), min(SAMPLE, len(expected))))
    with path.open("rb") as file:
        return next((block for block in chosen if _differs(file, block, expected[block])), None)


def damaged(path: Path, expected: Iterable[str]) -> list[int]:
    """All blocks that have another digest."""
    with path.open("rb") as file:
        return [block for block, digest in enumerate(expected) if _differs(file, block, digest)]


def _differs(file: BinaryIO, block: int, expected: str) -> bool:
    file.seek(block * BLOCK)
    return _digest(file.read(BLOCK)) != expected


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
