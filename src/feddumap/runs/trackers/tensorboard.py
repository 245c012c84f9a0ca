"""TensorBoard event files with the numbers of the records, by round.

Opening a run writes a new file from its records, under a name that sorts after the previous file, and
truncates that: after resuming from an older checkpoint no round is duplicated or stale.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from feddumap.config import Config
from feddumap.errors import FeddumapError
from feddumap.runs.directory import RunDirectory
from feddumap.runs.trackers.base import numbers

NAME = "events.out.tfevents.{:010d}.feddumap"  # TensorBoard recognises the prefix


def start(directory: RunDirectory, config: Config, records: Sequence[Mapping[str, Any]]) -> Events:
    """The event file in the run directory, with the records so far."""
    return Events(directory.path / "tensorboard", records, directory.began)


class Events:
    """The event file of a run, in `folder`, open for further rounds.

    `began` is when the run started, in seconds since 1970. The time of an event is `began` plus the `wall` of
    its record.
    """

    def __init__(self, folder: Path, records: Iterable[Mapping[str, Any]], began: float) -> None:
        self._events, self._summaries, writer = require()
        self._began = began
        folder.mkdir(exist_ok=True)
        older = {number: path for path in folder.iterdir() if (number := _number(path)) is not None}
        self._file = (folder / NAME.format(max(older, default=-1) + 1)).open("wb")
        self._writer = writer.RecordWriter(self._file)
        # in this version a session start replaces all events from its step on, also in a TensorBoard that
        # has read the previous file
        self._write(wall_time=began, file_version="brain.Event:2")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(wall_time=began, step=0, session_log=start)
        for record in records:
            self._add(record)
        self._file.flush()
        for path in older.values():
            os.truncate(path, 0)  # a TensorBoard reading a deleted file would get stuck

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a round and flush the file."""
        self._add(record)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, record: Mapping[str, Any]) -> None:
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in numbers(record).items()]
        summary = self._summaries.Summary(value=values)
        self._write(wall_time=self._began + record["wall"], step=record["round"], summary=summary)

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(**fields).SerializeToString())


def require() -> tuple[Any, Any, Any]:
    """TensorBoard's modules for events, summaries and record writing; an error if it is not installed."""
    try:
        return (
            import_module("tensorboard.compat.proto.event_pb2"),
            import_module("tensorboard.compat.proto.summary_pb2"),
            import_module("tensorboard.summary.writer.record_writer"),
        )
    except ImportError as error:
        raise FeddumapError(
            f"run.tensorboard = true needs the package tensorboard, which cannot be imported here ({error}): "
            "pip install tensorboard, or set it to false"
        ) from None


def _number(path: Path) -> int | None:
    match = re.fullmatch(r"events\.out\.tfevents\.(\d{10})\.feddumap", path.name)
    return int(match[1]) if match else None
