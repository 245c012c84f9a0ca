"""The run directory; no module outside `feddumap.runs` writes one.

config.toml          the resolved configuration
command.txt          the command line that started the run, if any
code.json            this user's signature of the code that the run names, if it does
split.safetensors    which images each device and the server hold
first-weights.safetensors  a copy of the initial weights, if `model.weights` is set or the network an object
frozen-*.safetensors the parameters that are not trained, if there are any
records.jsonl        one line per round
checkpoint-*.json    the server state, with its tensors in the .safetensors file of the same name
devices/             the state of devices between rounds, for methods with stateful devices
token                with Flower: identifies the run on devices
census.json          with Flower: what devices told of their data
privacy.key          of private runs: what their noise and cohorts are drawn from; for their owner alone
nodes/               in Flower's simulation: the state of its nodes
summary.json         written when the run finishes
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
import torch

from feddumap.config import Config
from feddumap.core.messages import ServerState, Tensors
from feddumap.data.partition import Split
from feddumap.device.state import FileStore
from feddumap.device.state import save as save_sealed
from feddumap.errors import FeddumapError
from feddumap.runs import integrity, trust
from feddumap.runs.checkpoints import Checkpoints
from feddumap.runs.existing import FIRST, NAMES, require_new, stored, was_interrupted
from feddumap.runs.integrity import FIRST_WEIGHTS, SPLIT
from feddumap.runs.reader import Checkpoint, read_config, read_records
from feddumap.runs.records import RecordLog
from feddumap.system.atomic_files import leftovers, make_folder, remove, write_text
from feddumap.system.json_text import parse_json


class RunDirectory:
    """The files of one run. A lock keeps a second process from writing the same run. Opening it deletes the
    temporary files that killed processes left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _hold(path, os.O_CREAT | os.O_RDWR)
        self.close = weakref.finalize(self, os.close, self._lock)  # once, and also if nobody does
        for left in leftovers(path, NAMES, locked=True):
            remove(left)
        self.memory = FileStore(path / "devices")
        self.memory.clean()
        self._log = RecordLog(path)
        self._checkpoints = Checkpoints(path, self._log, self.memory)
        self._config: dict[str, Any] = {}  # as it is stored
        self._split = ""  # the digest of the split

    @staticmethod
    def create(
        path: Path, config: Config, split: Split, initial_weights: Tensors | None = None
    ) -> RunDirectory:
        """Make a run directory with its configuration and split; it is an error if it exists already."""
        require_new(path, config)
        make_folder(path)
        directory = RunDirectory(path)
        arrays = {name: torch.from_numpy(array) for name, array in split.to_arrays().items()}
        try:
            directory._split = save_sealed(path / SPLIT, arrays)
            if initial_weights is not None:
                save_sealed(directory.initial_weights, initial_weights)
            # last, because a directory with a configuration counts as a run
            directory.set_config(config)
        except BaseException:
            directory.close()
            shutil.rmtree(path)
            raise
        return directory

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """Open an existing run directory to resume its run. If its creation was interrupted, what is there is
        deleted."""
        if was_interrupted(path):
            RunDirectory(path).discard()
            raise FeddumapError(
                f"the run in {path} was interrupted before its directory was complete, so there is nothing "
                f"to resume: start it again with `feddumap train … --out {path}`"
            )
        if not (path / "config.toml").is_file():
            read_config(path)  # the error
        directory = RunDirectory(path)
        if (problem := integrity.config_problem(path)) is not None:
            directory.close()
            raise FeddumapError(
                f"{problem}: undo that, or run `feddumap verify {path}`, which restores it from a checkpoint"
                if integrity.recorded_config(path) is not None
                else problem
            )
        directory._config = read_config(path).to_toml()
        return directory

    def discard(self) -> None:
        """Delete a directory whose creation was interrupted, and close it."""
        for name in (*FIRST, ".lock"):
            remove(self.path / name)
        self.path.rmdir()
        self.close()

    @property
    def initial_weights(self) -> Path:
        """The file with the copy of the initial weights."""
        return self.path / FIRST_WEIGHTS

    @property
    def began(self) -> float:
        """When the run was started, in seconds since 1970."""
        return (self.path / SPLIT).stat().st_mtime

    def config(self) -> Config:
        return read_config(self.path)

    def set_config(self, config: Config) -> None:
        value = stored(config).to_toml()
        write_text(self.path / "config.toml", tomli_w.dumps(value))
        self._config = value

    def note(self, command: str) -> None:
        """Record the command line that started this run."""
        write_text(self.path / "command.txt", command + "\n")

    def token(self) -> str:
        """A random identifier of this run for devices; resuming does not change it."""
        path = self.path / "token"
        if not path.exists():
            write_text(path, secrets.token_hex(16) + "\n")
        return path.read_text(encoding="utf-8").strip()

    def secret(self, new: bool) -> int:
        """The key of a private run, which seeds its noise and its cohorts: drawn once, then read. It is an
        error if it is missing and the run is not `new`."""
        path = self.path / "privacy.key"
        if new and not path.exists():
            write_text(path, secrets.token_hex(32) + "\n", mode=0o600)
        try:
            return int(path.read_text(encoding="utf-8"), 16)
        except (OSError, ValueError):
            raise FeddumapError(
                f"{path} is missing or unreadable: the rounds after it would have other noise than those "
                "before; restore it, or start a new run under another name"
            ) from None

    def census(self) -> Any:
        """What devices told of their data, if it is stored and is JSON."""
        try:
            return parse_json((self.path / "census.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return {"damaged": str(error)}

    def keep_census(self, value: Mapping[str, Any]) -> None:
        write_text(self.path / "census.json", json.dumps(value) + "\n")

    def split(self, images: int) -> Split:
        arrays, self._split = integrity.read_split(self.path)
        return Split.from_arrays(arrays, images)

    # records

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the record of a round, all of it or nothing."""
        self._log.append(record)

    def records(self) -> list[dict[str, Any]]:
        """All complete lines; an incomplete last line is skipped."""
        return read_records(self.path)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    # checkpoints

    def save(self, state: ServerState, wall: float) -> None:
        """Write a checkpoint, see `Checkpoints.save`."""
        self._checkpoints.save(state, wall, self._config, self._split)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest usable checkpoint, and messages about newer ones; see `Checkpoints.latest`."""
        return self._checkpoints.latest()

    def rewind(self, number: int) -> list[dict[str, Any]]:
        """Delete what was written after the first `number` rounds; see `Checkpoints.rewind`."""
        return self._checkpoints.rewind(number)


def look(path: Path) -> int | None:
    """Lock a run directory to read it, without writing: a file descriptor to close, None if it never was
    locked."""
    return _hold(path, os.O_RDONLY) if (path / ".lock").exists() else None


def _hold(path: Path, flags: int) -> int:
    lock = os.open(path / ".lock", flags, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise FeddumapError(f"{path} is in use by another process: wait for it or stop it") from None
        raise
    return lock


def sign_code(path: Path, config: Config) -> None:
    """Sign the code that a run names, if it does: this user knows it. See `feddumap.runs.trust`."""
    named = trust.code_of(path, config)
    if named and not trust.is_known(path, named):
        write_text(path / trust.FILE, json.dumps(trust.signature_of(named)) + "\n")


def require_trust(path: Path, given: bool, action: str) -> None:
    """With `given`, sign the code that a run names; without, it is an error if this user has not signed it.
    `action` is what would import it, such as `resuming`."""
    if was_interrupted(path):
        return  # there is no run that could name any: `RunDirectory.open` says so
    config = read_config(path)
    if given:
        sign_code(path, config)
    else:
        trust.require(path, config, action)
