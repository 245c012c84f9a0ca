"""records.jsonl: a line per round. `RecordLog` appends to it for `runs/directory.py`, with a running digest
of the lines, so that a checkpoint can say which records it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from feddumap.errors import FeddumapError
from feddumap.runs.stored_forms import record_line, record_problem
from feddumap.system.atomic_files import append, sync, write_bytes
from feddumap.system.json_text import parse_json

NAME = "records.jsonl"


@dataclass(frozen=True)
class Mark:
    """The end of a round in records.jsonl: the number of its first bytes and their SHA-256."""

    bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> Mark | None:
        """The mark in a checkpoint; None for checkpoints of versions that had none."""
        if value is None:
            return None
        size, sha = value["bytes"], value["sha256"]
        if type(size) is not int or size < 0 or not isinstance(sha, str):
            raise ValueError("its mark in records.jsonl is not a size and a checksum")
        return Mark(size, sha)


def mark_of(data: bytes) -> Mark:
    """The mark of records.jsonl as a whole."""
    return Mark(len(data), hashlib.sha256(data).hexdigest())


def entries(data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of records.jsonl and their records, up to the first line that is incomplete or is not the
    record of its round."""
    found: list[tuple[bytes, dict[str, Any]]] = []
    for line in data.splitlines(keepends=True):
        try:
            record: Any = parse_json(line.decode()) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if record_problem(record, len(found)) is not None:
            break
        found.append((line, record))
    return found


def read_bytes(directory: Path) -> bytes:
    """The content of records.jsonl; empty before the first round."""
    path = directory / NAME
    return path.read_bytes() if path.exists() else b""


class RecordLog:
    """The records of a run, to append to. It knows the marks of the last two rounds: a state that is one
    round behind the records can still be saved, and a round that is repeated replaces its record."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._load([line for line, _ in entries(read_bytes(directory))])

    def _load(self, lines: Sequence[bytes]) -> None:
        data = b"".join(lines)
        self._sha = hashlib.sha256(data)
        self._marks = {len(lines): mark_of(data)}

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the record of a round; if that fails, the file and this log are as before."""
        number = record["round"]
        before = self.mark(number)
        line = record_line(record).encode()
        append(self._path, line, before.bytes)
        if number != max(self._marks):  # the round was interrupted after its record had been written
            self._sha = hashlib.sha256(self._path.read_bytes()[: before.bytes])
        self._sha.update(line)
        after = Mark(before.bytes + len(line), self._sha.hexdigest())
        self._marks = {number: before, number + 1: after}

    def mark(self, rounds: int) -> Mark:
        """The mark after so many rounds, one of the last two."""
        if rounds not in self._marks:
            raise FeddumapError(
                f"{self._path} has the records of {max(self._marks)} rounds, not of {rounds}: it was changed "
                "by another program; resume the run"
            )
        return self._marks[rounds]

    def truncate(self, rounds: int) -> list[dict[str, Any]]:
        """Keep the records of the first rounds only, and return them; an error if there are fewer, so that
        nothing is cut that a checkpoint was made with."""
        data = read_bytes(self._path.parent)
        kept = entries(data)[:rounds]
        if len(kept) < rounds:
            raise FeddumapError(
                f"{self._path}: line {len(kept) + 1} is not a record that this version reads, but a "
                f"checkpoint of {rounds} rounds was made with it: nothing was changed"
            )
        lines = [line for line, _ in kept]
        if b"".join(lines) != data:
            write_bytes(self._path, b"".join(lines))
        self._load(lines)
        return [record for _, record in kept]

    def sync(self) -> None:
        """Flush the file to disk."""
        if self._path.exists():
            sync(self._path)
