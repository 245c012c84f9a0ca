"""The run directory, and the only code that writes one.

config.toml          the resolved configuration
command.txt          the command line that made the run, if one did
split.safetensors    which images each device and the server hold
first-weights.safetensors  the weights to start from, where `model.weights` names some
records.jsonl        one line a round
checkpoint-*.json    the server's state: numbers here, tensors in the .safetensors beside it
devices/             what devices keep for themselves between rounds, where the method has them do so
token                over Flower: what devices know this run by
nodes/               in Flower's simulation: what its nodes keep for themselves
summary.json         at the end
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as to_bytes

from feddumap.config import CARRIED_OUT, Config, read_toml
from feddumap.core.messages import Architecture, ServerState, Tensors
from feddumap.data.partition import Split
from feddumap.device.state import FileStore
from feddumap.errors import FeddumapError
from feddumap.system.atomic_files import sync, write_bytes, write_text

GROUPS = ("weights", "mask", "steps")
KEPT = 2  # checkpoints


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the state, the wall-clock seconds spent to get there, and the rounds in which the devices
    made the memories they have then."""

    state: ServerState
    wall: float
    devices: dict[str, int]


class RunDirectory:
    """One run on disk. Held under a lock: two processes never write the same run."""

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
        self.memory = FileStore(path / "devices")

    def close(self) -> None:
        os.close(self._lock)

    @staticmethod
    def create(
        path: Path, config: Config, split: Split, first_weights: Tensors | None = None
    ) -> RunDirectory:
        """A new run directory with its configuration and split; a directory that exists is refused."""
        refuse_existing(path, config)
        path.mkdir(parents=True, exist_ok=True)
        directory = RunDirectory(path)
        arrays = {name: torch.from_numpy(array) for name, array in split.to_arrays().items()}
        try:
            write_bytes(path / "split.safetensors", to_bytes(arrays))
            if first_weights is not None:
                plain = {name: tensor.contiguous() for name, tensor in first_weights.items()}
                write_bytes(directory.first_weights, to_bytes(plain))
            # the configuration comes last: a directory with one is a run
            directory.set_config(config)
        except BaseException:
            directory.close()
            shutil.rmtree(path)
            raise
        return directory

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """An existing run directory, to go on with."""
        read_config(path)
        return RunDirectory(path)

    @property
    def first_weights(self) -> Path:
        """A copy of the weights that `model.weights` named."""
        return self.path / "first-weights.safetensors"

    def config(self) -> Config:
        return read_config(self.path)

    def set_config(self, config: Config) -> None:
        write_text(self.path / "config.toml", tomli_w.dumps(config.to_toml()))

    def note(self, command: str) -> None:
        """Remember the command line that made this run, for whoever looks at it later."""
        write_text(self.path / "command.txt", command + "\n")

    def token(self) -> str:
        """A random name by which devices know this run, the same when it is resumed."""
        path = self.path / "token"
        if not path.exists():
            write_text(path, secrets.token_hex(16) + "\n")
        return path.read_text(encoding="utf-8").strip()

    def split(self, images: int) -> Split:
        path = self.path / "split.safetensors"
        try:
            tensors = load_tensors(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise FeddumapError(
                f"cannot read {path}: {error}; start the run anew under another name"
            ) from None
        return Split.from_arrays({name: tensor.numpy() for name, tensor in tensors.items()}, images)

    # records

    def append(self, record: dict[str, Any]) -> None:
        with (self.path / "records.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Every whole line; a half-written last one is left out."""
        return read_records(self.path)

    def keep_records(self, count: int) -> list[dict[str, Any]]:
        """Cut the records back to the first `count` rounds: those the checkpoint has."""
        records = self.records()[:count]
        if [record["round"] for record in records] != list(range(count)):
            raise FeddumapError(
                f"{self.path / 'records.jsonl'} lacks rounds that the checkpoint has (found {len(records)} "
                f"of {count}): it was altered; start the run anew under another name"
            )
        write_text(self.path / "records.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        return records

    def summarise(self, summary: dict[str, Any]) -> None:
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    # checkpoints

    def save(self, state: ServerState, wall: float) -> None:
        """Write a checkpoint whole, then drop all but the newest two. Its JSON comes last and vouches, by
        checksum, for the tensors and for itself."""
        sync_file = self.path / "records.jsonl"
        if sync_file.exists():
            sync(sync_file)
        name = f"checkpoint-{state.round:06d}"
        tensors: Tensors = {
            f"{group}/{key}": tensor.contiguous()
            for group in GROUPS
            for key, tensor in getattr(state, group).items()
        }
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
        write_text(self.path / f"{name}.json", json.dumps({**value, "sha256": _digest(value)}, indent=2))
        for old in self._checkpoints()[KEPT:]:
            _remove(old)
        self.memory.tidy(_number(self._checkpoints()[-1]))

    def latest(self) -> tuple[Saved | None, list[str]]:
        """The newest good checkpoint, and a sentence about each newer one that was damaged."""
        damaged: list[str] = []
        for path in self._checkpoints():
            try:
                saved = read_checkpoint(path)
            except FeddumapError as error:
                damaged.append(str(error))
                continue
            try:
                self.memory.verify(saved.devices)
                return saved, damaged
            except FeddumapError as error:
                damaged.append(f"checkpoint {path.name} cannot be used: {error}")
        return None, damaged

    def go_back(self, number: int) -> list[dict[str, Any]]:
        """Leave what is after `number` rounds, damaged checkpoints first: else they would outlive the good
        ones that are still to come. Returns the records that stay."""
        for path in self._checkpoints():
            if _number(path) > number:
                _remove(path)
        return self.keep_records(number)

    def _checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted(self.path.glob("checkpoint-*.json"), reverse=True)


def read_checkpoint(path: Path) -> Saved:
    """Read and verify one checkpoint; anything amiss is an error that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        expected = value.pop("sha256")
        if expected != _digest(value):
            raise ValueError("its checksum does not match")
        data = path.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(data).hexdigest() != value["tensors_sha256"]:
            raise ValueError("the checksum of its tensors does not match")
        groups: dict[str, Tensors] = {group: {} for group in GROUPS}
        for name, tensor in load_tensors(data).items():
            group, _, key = name.partition("/")
            groups[group][key] = tensor
        architecture = Architecture.from_json(value["architecture"])
        state = ServerState(value["round"], architecture, **groups, clock=value["clock"])
        return Saved(state, value["wall"], value["devices"])
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise FeddumapError(f"checkpoint {path.name} is damaged: {error}") from None


def _remove(checkpoint: Path) -> None:
    checkpoint.unlink(missing_ok=True)
    checkpoint.with_suffix(".safetensors").unlink(missing_ok=True)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("checkpoint-"))


def read_config(path: Path) -> Config:
    """A run's configuration; a folder without one is no run."""
    if not (path / "config.toml").is_file():
        raise FeddumapError(
            f"{path} is not a run directory (it has no config.toml): give the folder of a run"
        )
    value = read_toml(path / "config.toml", "configuration")
    train = value.get("train")
    if isinstance(train, dict):
        train.pop("stack", None)  # see `trained_as_one`
        train.setdefault("kernels", "torch")  # runs from before there were others
    return Config.parse(value)


def trained_as_one(path: Path) -> int:
    """How many devices of a run from before 0.2 took their steps together, which is no longer done."""
    train = read_toml(path / "config.toml", "configuration").get("train", {})
    return int(train.get("stack", 1)) if isinstance(train, dict) else 1


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's records.jsonl, in order; none if it has not begun."""
    file = path / "records.jsonl"
    if not file.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith("\n") else None
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict) or record.get("round") != len(records):
            break  # killed while writing: the checkpoint says what counts
        records.append(record)
    return records


def refuse_existing(path: Path, config: Config) -> None:
    """Never train over something: say what is there and what to do."""
    if holds(path, config):
        raise FeddumapError(f"{path} holds this run already: go on with `feddumap resume {path}`")


def holds(path: Path, config: Config) -> bool:
    """Whether a directory has this run in it, or nothing; anything else is an error."""
    if path.is_file():
        raise FeddumapError(f"{path} is a file: give --out the name of a folder that does not exist yet")
    if not path.exists() or not any(entry.name != ".lock" for entry in path.iterdir()):
        return False
    if not (path / "config.toml").is_file():
        raise FeddumapError(f"{path} exists and is not a run directory: give --out another name")
    other = read_config(path)
    config = carried_out_like(config, other)
    if other == config:
        return True
    key, theirs, ours = _difference(other, config)
    raise FeddumapError(
        f"{path} belongs to another configuration ({key} is {theirs!r} there, {ours!r} here): "
        f"give --out another name, or go on with that run by `feddumap resume {path}`"
    )


def carried_out_like(config: Config, other: Config) -> Config:
    """A configuration with the other's keys of how a run is carried out. A run keeps the kernels it began
    with."""
    return config.replace(
        run={key: getattr(other.run, key) for key in CARRIED_OUT}, train={"kernels": other.train.kernels}
    )


def _difference(one: Config, other: Config) -> tuple[str, Any, Any]:
    a, b = one.model_dump(), other.model_dump()
    for section in a:
        for key in [*a[section], *b[section]]:
            if a[section].get(key) != b[section].get(key):
                return f"{section}.{key}", a[section].get(key), b[section].get(key)
    raise AssertionError("the configurations are equal")


def _digest(value: Sequence[Any] | dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
