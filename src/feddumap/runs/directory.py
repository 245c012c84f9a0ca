"""The run directory; no other module writes one.

config.toml          the resolved configuration
command.txt          the command line that started the run, if any
split.safetensors    which images each device and the server hold
first-weights.safetensors  a copy of the initial weights, if `model.weights` is set or the network an object
frozen-*.safetensors the parameters that are not trained, if there are any
records.jsonl        one line per round
checkpoint-*.json    the server state, with its tensors in the .safetensors file of the same name
devices/             the state of devices between rounds, for methods with stateful devices
token                with Flower: identifies the run on devices
privacy.key          of private runs: what their noise and cohorts are drawn from; for their owner alone
nodes/               in Flower's simulation: the state of its nodes
summary.json         written when the run finishes
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
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
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as to_bytes

from feddumap.config import RUNTIME_KEYS, Config
from feddumap.core.messages import ServerState, Tensors
from feddumap.core.object_names import stored_name
from feddumap.data.partition import Split
from feddumap.device.state import FileStore
from feddumap.errors import FeddumapError
from feddumap.methods import registry
from feddumap.models.frozen import constants_of
from feddumap.runs.reader import (
    GROUPS,
    Checkpoint,
    digest,
    frozen_path,
    read_checkpoint,
    read_config,
    read_records,
)
from feddumap.system.atomic_files import sync, write_bytes, write_text

KEPT_CHECKPOINTS = 2


class RunDirectory:
    """The files of one run. A lock keeps a second process from writing the same run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise FeddumapError(f"{path} is in use by another process: wait for it or stop it") from None
            raise
        self.close = weakref.finalize(self, os.close, self._lock)  # once, and also if nobody does
        self.memory = FileStore(path / "devices")

    @staticmethod
    def create(
        path: Path, config: Config, split: Split, initial_weights: Tensors | None = None
    ) -> RunDirectory:
        """Make a run directory with its configuration and split; it is an error if it exists already."""
        require_new(path, config)
        path.mkdir(parents=True, exist_ok=True)
        directory = RunDirectory(path)
        arrays = {name: torch.from_numpy(array) for name, array in split.to_arrays().items()}
        try:
            write_bytes(path / "split.safetensors", to_bytes(arrays))
            if initial_weights is not None:
                contiguous = {name: tensor.contiguous() for name, tensor in initial_weights.items()}
                write_bytes(directory.initial_weights, to_bytes(contiguous))
            # last, because a directory with a configuration counts as a run
            directory.set_config(config)
        except BaseException:
            directory.close()
            shutil.rmtree(path)
            raise
        return directory

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """Open an existing run directory to resume its run."""
        read_config(path)
        return RunDirectory(path)

    @property
    def initial_weights(self) -> Path:
        """The file with the copy of the initial weights."""
        return self.path / "first-weights.safetensors"

    @property
    def began(self) -> float:
        """When the run was started, in seconds since 1970."""
        return (self.path / "split.safetensors").stat().st_mtime

    def config(self) -> Config:
        return read_config(self.path)

    def set_config(self, config: Config) -> None:
        write_text(self.path / "config.toml", tomli_w.dumps(stored(config).to_toml()))

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

    def split(self, images: int) -> Split:
        path = self.path / "split.safetensors"
        try:
            tensors = load_tensors(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise FeddumapError(f"cannot read {path}: {error}; start a new run under another name") from None
        return Split.from_arrays({name: tensor.numpy() for name, tensor in tensors.items()}, images)

    # records

    def append(self, record: Mapping[str, Any]) -> None:
        with (self.path / "records.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All complete lines; an incomplete last line is skipped."""
        return read_records(self.path)

    def truncate_records(self, count: int) -> list[dict[str, Any]]:
        """Keep the records of the first `count` rounds only, those before the checkpoint."""
        records = self.records()[:count]
        if [record["round"] for record in records] != list(range(count)):
            raise FeddumapError(
                f"{self.path / 'records.jsonl'} lacks rounds that the checkpoint has (found {len(records)} "
                f"of {count}): it was modified; start a new run under another name"
            )
        write_text(self.path / "records.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        return records

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    # checkpoints

    def save(self, state: ServerState, wall: float) -> None:
        """Write a checkpoint atomically, then delete all but the newest two. Its JSON file is written last
        and has checksums of the tensors and of itself."""
        records = self.path / "records.jsonl"
        if records.exists():
            sync(records)
        name = f"checkpoint-{state.round:06d}"
        tensors: Tensors = {
            f"{group}/{key}": tensor.contiguous()
            for group in GROUPS
            for key, tensor in getattr(state, group).items()
        }
        frozen = frozen_path(self.path, state.architecture)
        if state.architecture.frozen and not frozen.exists():
            constants = constants_of(state.architecture)
            write_bytes(frozen, to_bytes({key: tensor.contiguous() for key, tensor in constants.items()}))
        tensor_path = self.path / f"{name}.safetensors"
        data = to_bytes(tensors)
        write_bytes(tensor_path, data)
        value = {
            "round": state.round,
            "architecture": state.architecture.to_json(),
            "clock": state.clock,
            "wall": wall,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            "devices": self.memory.newest(state.round),
        }
        write_text(self.path / f"{name}.json", json.dumps({**value, "sha256": digest(value)}, indent=2))
        for old in self._checkpoints()[KEPT_CHECKPOINTS:]:
            _remove(old)
        self.memory.tidy(_number(self._checkpoints()[-1]))

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest valid checkpoint, and a message about each newer one that is damaged."""
        damaged: list[str] = []
        for path in self._checkpoints():
            try:
                checkpoint = read_checkpoint(path)
            except FeddumapError as error:
                damaged.append(str(error))
                continue
            try:
                self.memory.verify(checkpoint.devices)
                return checkpoint, damaged
            except FeddumapError as error:
                damaged.append(f"checkpoint {path.name} cannot be used: {error}")
        return None, damaged

    def rewind(self, number: int) -> list[dict[str, Any]]:
        """Delete the checkpoints and records after the first `number` rounds, damaged checkpoints included,
        which would otherwise count as the newest. Returns the remaining records."""
        for path in self._checkpoints():
            if _number(path) > number:
                _remove(path)
        return self.truncate_records(number)

    def _checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted(self.path.glob("checkpoint-*.json"), reverse=True)


def _remove(checkpoint: Path) -> None:
    checkpoint.unlink(missing_ok=True)
    checkpoint.with_suffix(".safetensors").unlink(missing_ok=True)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("checkpoint-"))


def require_new(path: Path, config: Config) -> None:
    """Raise an error if a directory contains a run already, or anything else."""
    if contains_run(path, config):
        raise FeddumapError(f"{path} holds this run already: continue it with `feddumap resume {path}`")


def contains_run(path: Path, config: Config) -> bool:
    """Whether a directory contains the run of this configuration; false if it is empty or does not exist, an
    error if it contains anything else."""
    if path.is_file():
        raise FeddumapError(f"{path} is a file: give --out the name of a folder that does not exist yet")
    if not path.exists() or not any(entry.name != ".lock" for entry in path.iterdir()):
        return False
    if not (path / "config.toml").is_file():
        raise FeddumapError(f"{path} exists and is not a run directory: give --out another name")
    other = read_config(path)
    other = other.model_copy(update={"method": registry.with_defaults(other.method)})
    config = stored(with_runtime_keys(config, other))
    if other == config:
        return True
    key, theirs, ours = _difference(other, config)
    raise FeddumapError(
        f"{path} belongs to another configuration ({key} is {theirs!r} there, {ours!r} here): "
        f"give --out another name, or resume that run with `feddumap resume {path}`"
    )


def stored(config: Config) -> Config:
    """A configuration as run directories hold it: what was passed as an object has the same name in every
    program that passes it."""
    names = {part: stored_name(getattr(config, part).name) for part in ("model", "method")}
    return config.replace(**{part: {"name": name} for part, name in names.items()})


def with_runtime_keys(config: Config, other: Config) -> Config:
    """A copy of `config` with the `RUNTIME_KEYS` and the kernels of `other`, since a run does not change
    kernels."""
    return config.replace(
        run={key: getattr(other.run, key) for key in RUNTIME_KEYS}, train={"kernels": other.train.kernels}
    )


def _difference(one: Config, other: Config) -> tuple[str, Any, Any]:
    a, b = one.model_dump(), other.model_dump()
    for section in a:
        for key in [*a[section], *b[section]]:
            if a[section].get(key) != b[section].get(key):
                return f"{section}.{key}", a[section].get(key), b[section].get(key)
    raise AssertionError("the configurations are equal")
