"""Whether the files of a run directory belong together.

A checkpoint carries the configuration, the digest of the split, its mark in records.jsonl and the digests of
the devices' states. Checkpoints of versions before these lack them; what they cannot tell is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors

from feddumap.config import RUNTIME_KEYS, Config
from feddumap.core.messages import Tensors
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError
from feddumap.methods import registry
from feddumap.runs import records
from feddumap.runs.reader import CHECKPOINT_ERRORS, Checkpoint, read_checkpoint, read_config, read_header
from feddumap.runs.records import Mark
from feddumap.system.callbacks import Say

SPLIT, FIRST_WEIGHTS = "split.safetensors", "first-weights.safetensors"


def checkpoints(directory: Path) -> list[Path]:
    """The JSON files of a run's checkpoints, newest first."""
    found = directory.glob("checkpoint-*.json")
    return sorted(found, key=lambda path: (len(path.name), path.name), reverse=True)  # by round


def newest(directory: Path, say: Say) -> Checkpoint:
    """The newest valid checkpoint of a run, which may be in training; `say` names damaged ones."""
    while True:
        paths = checkpoints(directory)
        damaged = []
        for path in paths:
            try:
                saved = read_checkpoint(path)
            except FeddumapError as error:
                if path.exists():  # a run in training deletes old checkpoints
                    damaged.append(str(error))
                continue
            if damaged:
                say(f"{'; '.join(damaged)}: using the model after {saved.state.round} rounds")
            return saved
        if paths == checkpoints(directory):
            break
    if damaged:
        raise FeddumapError(
            f"{directory} has no valid checkpoint ({'; '.join(damaged)}): run `feddumap resume {directory}`"
        )
    raise FeddumapError(
        f"{directory} has no checkpoint yet: wait for the first round or run `feddumap resume {directory}`"
    )


def headers(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The JSON parts of the checkpoints that are not damaged, newest first."""
    found = []
    for path in checkpoints(directory):
        try:
            found.append((path, read_header(path)))
        except CHECKPOINT_ERRORS:  # `read_checkpoint` names it; or it was just deleted by the run
            continue
    return found


# the configuration


def config_difference(recorded: dict[str, Any], config: Config) -> str | None:
    """How a configuration differs from the one that a checkpoint carries, in a key that affects results. The
    number of rounds and the keys of `RUNTIME_KEYS` may change while a run goes on."""
    before = Config.parse(recorded)
    before = before.replace(
        run={key: getattr(config.run, key) for key in RUNTIME_KEYS}, train={"rounds": config.train.rounds}
    )
    one, other = (
        each.model_copy(update={"method": registry.with_defaults(each.method)}) for each in (before, config)
    )
    return None if one == other else "{} is {!r} instead of {!r}".format(*difference(other, one))


def difference(one: Config, other: Config) -> tuple[str, Any, Any]:
    """The first key in which two configurations differ, and its values."""
    a, b = one.model_dump(), other.model_dump()
    for section in a:
        for key in [*a[section], *b[section]]:
            if a[section].get(key) != b[section].get(key):
                return f"{section}.{key}", a[section].get(key), b[section].get(key)
    raise AssertionError("the configurations are equal")


def recorded_config(directory: Path) -> dict[str, Any] | None:
    """The configuration that the newest checkpoint carries, if any does."""
    found = [header["config"] for _, header in headers(directory) if header.get("config") is not None]
    return found[0] if found else None


def config_problem(directory: Path) -> str | None:
    """What is wrong with config.toml; None if it can be read and is that of the newest checkpoint."""
    recorded = recorded_config(directory)
    try:
        config = read_config(directory)
        differs = config_difference(recorded, config) if recorded is not None else None
    except FeddumapError as error:
        return str(error) if str(directory) in str(error) else f"{directory / 'config.toml'}: {error}"
    return f"{directory / 'config.toml'} was changed after the run began: {differs}" if differs else None


# the split and the initial weights


def read_sealed(path: Path) -> tuple[Tensors, str]:
    """The tensors of a file that `feddumap.device.state.save` wrote, and their digest, which is checked.
    Files of versions before have none in them. Raises `OSError`, `ValueError` or `SafetensorError`."""
    data = path.read_bytes()
    tensors: Tensors = load_tensors(data)
    made = digest(tensors)
    with safe_open(path, "pt") as file:
        expected = (file.metadata() or {}).get("digest")
    if expected is not None and expected != made:
        raise ValueError("its checksum does not match")
    return tensors, made


def require_sealed(path: Path) -> None:
    """Raise an error if a file of tensors is not as it was written."""
    try:
        read_sealed(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise FeddumapError(f"cannot read {path}: {error}; start a new run under another name") from None


def read_split(directory: Path) -> tuple[dict[str, np.ndarray], str]:
    """The arrays of the split and their digest."""
    path = directory / SPLIT
    try:
        tensors, made = read_sealed(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise FeddumapError(f"cannot read {path}: {error}; start a new run under another name") from None
    for file, header in headers(directory)[:1]:
        if header.get("split") not in (None, made):
            raise FeddumapError(
                f"{path} is not the split that {file.name} was made with: run `feddumap verify {directory}`"
            )
    return {name: tensor.numpy() for name, tensor in tensors.items()}, made


# the records

Support = Literal["whole", "short", "altered"]


def support(mark: Mark | None, rounds: int, data: bytes) -> Support:
    """Whether records.jsonl has the records that a checkpoint of `rounds` rounds was made with."""
    if mark is None:  # a checkpoint of a version without marks
        return "whole" if len(records.entries(data)) >= rounds else "short"
    if len(data) < mark.bytes:
        return "short"
    return "whole" if records.mark_of(data[: mark.bytes]) == mark else "altered"


def records_problem(checkpoint: str, rounds: int, supported: Support) -> str:
    """A sentence about records that do not support a checkpoint."""
    how = "lacks" if supported == "short" else "was altered in"
    return f"{records.NAME} {how} rounds that {checkpoint} was made with ({rounds})"


def notes(directories: Sequence[Path]) -> list[str]:
    """A sentence about each run whose configuration or records are not those of its newest checkpoint."""
    found = []
    for directory in directories:
        problem = config_problem(directory)
        for path, header in headers(directory)[:1]:
            try:
                mark, rounds = Mark.from_json(header.get("records")), int(header["round"])
            except CHECKPOINT_ERRORS:
                continue
            supported = support(mark, rounds, records.read_bytes(directory)) if mark else "whole"
            if problem is None and supported != "whole":
                problem = f"{directory}: {records_problem(path.name, rounds, supported)}"
        if problem is not None:
            found.append(f"{problem}: its numbers may be wrong; see `feddumap verify {directory} --dry-run`")
    return found
