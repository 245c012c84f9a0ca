"""The checkpoints of a run directory: written, chosen and deleted here, read by `feddumap.runs.reader`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_bytes

from feddumap.core.messages import ServerState, Tensors
from feddumap.device.state import FileStore
from feddumap.errors import FeddumapError
from feddumap.models.frozen import constants_of
from feddumap.runs import integrity, records
from feddumap.runs.reader import GROUPS, Checkpoint, digest, frozen_path, read_checkpoint
from feddumap.runs.records import RecordLog
from feddumap.system.atomic_files import remove, write_bytes, write_text

KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of the run in `path`, with the records and the devices' states that they name."""

    path: Path
    log: RecordLog
    memory: FileStore

    def save(self, state: ServerState, wall: float, config: Mapping[str, Any], split: str) -> None:
        """Write a checkpoint atomically, then delete all but the newest two. Its JSON file is written last
        and has checksums of the tensors and of itself, the stored configuration and the split's digest."""
        mark = self.log.mark(state.round)
        self.log.sync()
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
        rounds_of_devices = self.memory.newest(state.round)
        value = {
            "round": state.round,
            "architecture": state.architecture.to_json(),
            "clock": state.clock,
            "wall": wall,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            "devices": rounds_of_devices,
            "memories": self.memory.digests(rounds_of_devices),
            "config": config,
            "split": split,
            "records": mark.to_json(),
        }
        write_text(self.path / f"{name}.json", json.dumps({**value, "sha256": digest(value)}, indent=2))
        for old in integrity.checkpoints(self.path)[KEPT_CHECKPOINTS:]:
            _remove(old)
        self.memory.tidy(_number(integrity.checkpoints(self.path)[-1]))

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is valid and has all of its records, and a message about each newer one
        that is not. It is an error if records were altered and no checkpoint is left."""
        problems: list[str] = []
        altered = False
        content = records.read_bytes(self.path)
        for path in integrity.checkpoints(self.path):
            try:
                checkpoint = read_checkpoint(path)
            except FeddumapError as error:
                problems.append(str(error))
                continue
            rounds = checkpoint.state.round
            supported = integrity.support(checkpoint.records, rounds, content)
            if supported != "whole":
                problems.append(integrity.records_problem(path.name, rounds, supported))
                altered = altered or supported == "altered"
                continue
            try:
                self.memory.verify(checkpoint.devices, checkpoint.memories)
                return checkpoint, problems
            except FeddumapError as error:
                problems.append(f"checkpoint {path.name} cannot be used: {error}")
        if altered:
            raise FeddumapError(
                f"{self.path}: {'; '.join(problems)}: undo that, or run `feddumap verify {self.path} "
                "--rewind` to begin again from round 0"
            )
        return None, problems

    def rewind(self, number: int) -> list[dict[str, Any]]:
        """Delete the checkpoints and records after the first `number` rounds, damaged checkpoints included,
        which would otherwise count as the newest. Returns the remaining records."""
        for path in integrity.checkpoints(self.path):
            if _number(path) > number:
                _remove(path)
        for tensors in self.path.glob("checkpoint-*.safetensors"):
            if not tensors.with_suffix(".json").exists():  # of a checkpoint that was not written to its end
                remove(tensors)
        return self.log.truncate(number)


def _remove(checkpoint: Path) -> None:
    remove(checkpoint)
    remove(checkpoint.with_suffix(".safetensors"))


def _number(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("checkpoint-"))
