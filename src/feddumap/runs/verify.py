"""`feddumap verify`: checks all files of a run directory, and restores what it can.

Without losing anything: temporary files are deleted, config.toml comes from a checkpoint's copy, a damaged
checkpoint is deleted where an older one is whole, records after the newest checkpoint are cut off where they
are damaged, and a wrong summary is deleted, which resuming writes again. Where the records of an intact
checkpoint were altered, going back to an older state would lose rounds, so it is done only with `rewind`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from feddumap.config import Config
from feddumap.device.state import NAMES as DEVICE_NAMES
from feddumap.device.state import FileStore
from feddumap.errors import FeddumapError
from feddumap.runs import integrity, records
from feddumap.runs.directory import RunDirectory, look
from feddumap.runs.existing import NAMES, was_interrupted
from feddumap.runs.integrity import FIRST_WEIGHTS, SPLIT
from feddumap.runs.reader import Checkpoint, read_checkpoint, read_config, read_records
from feddumap.runs.summary import accuracies, read_summary
from feddumap.system.atomic_files import leftovers, remove
from feddumap.system.findings import Finding


@dataclass(frozen=True)
class Verification:
    """A check of one run directory. With `repair`, what can be restored without losing rounds is; with
    `rewind`, the run also goes back to the newest state that all files support."""

    path: Path
    repair: bool
    rewind: bool = False

    def run(self) -> list[Finding]:
        if was_interrupted(self.path):
            return [self._interrupted()]
        if not (self.path / "config.toml").is_file() and integrity.recorded_config(self.path) is None:
            read_config(self.path)  # the error that says what a run directory is
        left = self._leftovers()
        directory = RunDirectory(self.path) if self.repair else None  # which deletes most of them
        lock = None if directory else look(self.path)
        try:
            found = [self._leftover(each) for each in left]
            found += [self._config(directory), self._split(), *self._first_weights()]
            usable, about = self._checkpoints()
            found += about
            about = list(self._records(directory, usable))
            found += [*about, *self._memories(usable)]
            if all(each.state != "damaged" for each in about):  # else the summary may be right
                found += self._summary()
        finally:
            if directory is not None:
                directory.close()
            if lock is not None:
                os.close(lock)
        return found

    def _finding(self, name: str, problem: str, remedy: str, restorable: bool = True) -> Finding:
        if self.repair and restorable:
            return Finding(name, "recovered", f"{problem}: {remedy}")
        return Finding(name, "damaged", f"{problem} ({'can be ' + remedy if restorable else remedy})")

    def _interrupted(self) -> Finding:
        message = "the run was interrupted while its directory was created"
        if not self.repair:
            return Finding(".", "leftover", message)
        RunDirectory(self.path).discard()
        return Finding(".", "recovered", f"{message}: deleted")

    def _leftovers(self) -> list[Path]:
        tensors = sorted(self.path.glob("checkpoint-*.safetensors"))
        return [
            *leftovers(self.path, NAMES, locked=True),
            *leftovers(self.path / "devices", DEVICE_NAMES),
            *(each for each in tensors if not each.with_suffix(".json").exists()),
        ]

    def _leftover(self, path: Path) -> Finding:
        if self.repair:
            remove(path)
        told = "left by an interrupted write" + (": deleted" if self.repair else "")
        return Finding(str(path.relative_to(self.path)), "leftover", told)

    def _config(self, directory: RunDirectory | None) -> Finding:
        problem, recorded = integrity.config_problem(self.path), integrity.recorded_config(self.path)
        if problem is None:
            told = "as in the newest checkpoint" if recorded else "readable; no checkpoint has a copy"
            return Finding("config.toml", "ok", told)
        if recorded is not None and directory is not None:
            directory.set_config(Config.parse(recorded))
        remedy = "restored from the newest checkpoint" if recorded else "no checkpoint has a copy"
        return self._finding("config.toml", problem, remedy, recorded is not None)

    def _split(self) -> Finding:
        try:
            integrity.read_split(self.path)
        except FeddumapError as error:
            problem = str(error).partition(": run `")[0].partition("; start ")[0]
            return self._finding(SPLIT, problem, "start the run again under another name", restorable=False)
        return Finding(SPLIT, "ok", "as when the run began")

    def _first_weights(self) -> Iterator[Finding]:
        if (self.path / FIRST_WEIGHTS).exists():
            try:
                integrity.read_sealed(self.path / FIRST_WEIGHTS)
                yield Finding(FIRST_WEIGHTS, "ok", "as when the run began")
            except (OSError, ValueError, SafetensorError) as error:
                yield self._finding(FIRST_WEIGHTS, str(error), "start the run again", restorable=False)

    def _checkpoints(self) -> tuple[list[Checkpoint], list[Finding]]:
        """The checkpoints that are whole, newest first, and what is to be said about each."""
        memory = FileStore(self.path / "devices")
        usable: list[Checkpoint] = []
        damaged: list[tuple[Path, str]] = []
        found: list[Finding] = []
        for path in integrity.checkpoints(self.path):
            try:
                checkpoint = read_checkpoint(path)
                memory.verify(checkpoint.devices, checkpoint.memories)
            except FeddumapError as error:
                damaged.append((path, str(error)))
                continue
            usable.append(checkpoint)
            known = "" if checkpoint.records else ", of a version that did not record its files"
            found.append(Finding(path.name, "ok", f"{checkpoint.state.round} rounds{known}"))
        for path, problem in damaged:
            if self.repair and usable:
                remove(path)
                remove(path.with_suffix(".safetensors"))
            remedy = (
                f"deleted, {usable[0].state.round} rounds are left" if usable else "no other one is whole"
            )
            found.append(self._finding(path.name, problem, remedy, bool(usable)))
        return usable, found

    def _records(self, directory: RunDirectory | None, usable: list[Checkpoint]) -> Iterator[Finding]:
        """The records against the marks of the checkpoints; those that they do not support are taken from
        `usable`."""
        content = records.read_bytes(self.path)
        unsupported: list[str] = []
        while usable:
            rounds = usable[0].state.round
            supported = integrity.support(usable[0].records, rounds, content)
            if supported == "whole":
                break
            unsupported.append(integrity.records_problem(f"checkpoint-{rounds:06d}.json", rounds, supported))
            usable.pop(0)
        start = usable[0].state.round if usable else 0
        lines = [line for line, _ in records.entries(content)]
        if unsupported:
            problem, back = "; ".join(unsupported), f"back to round {start}"
            if directory is not None and self.rewind:
                directory.rewind(start)
                yield Finding(records.NAME, "recovered", f"{problem}: went {back}")
            else:
                yield Finding(records.NAME, "damaged", f"{problem} (--rewind goes {back})")
        elif len(lines) < start:
            yield Finding(
                records.NAME,
                "damaged",
                f"line {len(lines) + 1} is not a record that this version reads, but the newest "
                "checkpoint was made with it: nothing was changed",
            )
        elif b"".join(lines) != content:
            if directory is not None:
                directory.rewind(start)
            remedy = f"cut to the {start} rounds of the newest checkpoint"
            yield self._finding(records.NAME, f"damaged after {len(lines)} rounds", remedy)
        else:
            after = f", {len(lines) - start} after the newest checkpoint" if len(lines) > start else ""
            yield Finding(records.NAME, "ok", f"{len(lines)} rounds{after}")

    def _memories(self, usable: list[Checkpoint]) -> Iterator[Finding]:
        """The states of devices. Those that a checkpoint needs were checked with it."""
        folder = self.path / "devices"
        paths = [
            path for path in sorted(folder.glob("*.safetensors")) if re.fullmatch(DEVICE_NAMES, path.name)
        ]
        if not paths:
            return
        needed = {(int(d), number) for each in usable for d, number in each.devices.items()}
        store, whole = FileStore(folder), 0
        for path in paths:
            device, number = map(int, path.stem.split("-"))
            try:
                store.verify({str(device): number})
                whole += 1
            except FeddumapError as error:
                if (device, number) in needed:  # named with its checkpoint
                    continue
                if self.repair:
                    remove(path)
                yield self._finding(f"devices/{path.name}", str(error), "deleted, no checkpoint needs it")
        yield Finding("devices/", "ok", f"{whole} of {len(paths)} states are whole")

    def _summary(self) -> Iterator[Finding]:
        """summary.json against the records."""
        if not (self.path / "summary.json").exists():
            return
        summary, known = read_summary(self.path), read_records(self.path)
        if summary is None:
            problem = "cannot be read"
        elif summary.get("rounds") != len(known):
            problem = f"of {summary.get('rounds')} rounds, but there are records of {len(known)}"
        elif summary.get("accuracy") != accuracies(known):
            problem = "its accuracies are not those of the records"
        else:
            yield Finding("summary.json", "ok", "as the records say")
            return
        if self.repair:
            remove(self.path / "summary.json")
        remedy = f"deleted; `feddumap resume {self.path}` writes it again"
        yield self._finding("summary.json", problem, remedy)
