"""Reads the files of run directories; `feddumap.runs.directory` writes them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from feddumap.config import Config, read_toml
from feddumap.core.messages import Architecture, ServerState, Tensors
from feddumap.errors import FeddumapError
from feddumap.models.frozen import constants_of, is_known, with_constants
from feddumap.runs import records
from feddumap.runs.records import Mark
from feddumap.runs.stored_forms import architecture_problem, checkpoint_problem
from feddumap.system.json_text import parse_json

CHECKPOINT_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
)
"""What reading a damaged checkpoint raises."""

GROUPS = ("weights", "mask", "steps")
"""The groups of tensors in a checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """The server state, the wall-clock seconds spent so far, and for each stateful device the round in which
    its state was written.

    The rest says which files the checkpoint belongs to: the configuration, the digest of the split, the mark
    in records.jsonl and the digests of the devices' states. Checkpoints of versions before these have None
    and no digests; `runs/integrity.py` leaves out the checks that need them.
    """

    state: ServerState
    wall: float
    devices: dict[str, int]
    config: dict[str, Any] | None = None
    split: str | None = None
    records: Mark | None = None
    memories: dict[str, str] = field(default_factory=dict)


def read_header(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, verified; raises `ValueError`, `OSError` and what wrong types raise."""
    value: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    expected = value.pop("sha256")
    if expected != digest(value):
        raise ValueError("its checksum does not match")
    if problem := checkpoint_problem(value):
        raise ValueError(problem)
    return value


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint; a damaged one is an error that names the file."""
    try:
        value = read_header(path)
        data = path.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(data).hexdigest() != value["tensors_sha256"]:
            raise ValueError("the checksum of its tensors does not match")
        groups: dict[str, Tensors] = {group: {} for group in GROUPS}
        for name, tensor in load_tensors(data).items():
            group, _, key = name.partition("/")
            groups[group][key] = tensor
        architecture = Architecture.from_json(value["architecture"])
        _read_frozen(path.parent, architecture)
        if problem := architecture_problem(architecture, {**groups["weights"], **constants_of(architecture)}):
            raise ValueError(problem)
        state = ServerState(value["round"], architecture, **groups, clock=value["clock"])
        return Checkpoint(
            state,
            value["wall"],
            value["devices"],
            value.get("config"),
            value.get("split"),
            Mark.from_json(value.get("records")),
            value.get("memories", {}),
        )
    except CHECKPOINT_ERRORS as error:
        raise FeddumapError(f"checkpoint {path.name} is damaged: {error}") from None


def frozen_path(directory: Path, architecture: Architecture) -> Path:
    """The file of an architecture's frozen tensors."""
    return directory / f"frozen-{architecture.frozen[:16]}.safetensors"


def _read_frozen(directory: Path, architecture: Architecture) -> None:
    """Make the frozen tensors of an architecture known to this process."""
    if not is_known(architecture):
        path = frozen_path(directory, architecture)
        if with_constants(architecture, load_tensors(path.read_bytes())) != architecture:
            raise ValueError(f"the checksum of {path.name} does not match")


def read_config(path: Path) -> Config:
    """The configuration of a run; it is an error if the folder has none."""
    if not (path / "config.toml").is_file():
        advice = "give the folder of a run"
        if any(path.glob("*/config.toml")):
            advice = (
                "give one of the runs in it, or repeat the command, such as `feddumap grid`, that began them"
            )
        raise FeddumapError(f"{path} is not a run directory (it has no config.toml): {advice}")
    value = read_toml(path / "config.toml", "configuration")
    train = value.get("train")
    if isinstance(train, dict):
        train.pop("stack", None)  # see `legacy_stack_size`
        train.setdefault("kernels", "torch")  # runs of versions without kernels in C
        train.setdefault("calibration", 0.0)  # runs of versions without calibration
    try:
        return Config.parse(value)
    except FeddumapError as error:
        raise FeddumapError(f"{path / 'config.toml'}: {error}") from None


def legacy_stack_size(path: Path) -> int:
    """`train.stack` of a run of version 0.1: how many devices were trained together. It has no effect now."""
    train = read_toml(path / "config.toml", "configuration").get("train", {})
    stack = train.get("stack", 1) if isinstance(train, dict) else 1
    return stack if type(stack) is int else 1


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a run, from the complete lines of records.jsonl; empty before the first round. What
    follows the first damaged line is left out: resuming truncates the file to the checkpoint."""
    return [record for _, record in records.entries(records.read_bytes(path))]


def digest(value: dict[str, Any]) -> str:
    """SHA-256 of a JSON value with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
