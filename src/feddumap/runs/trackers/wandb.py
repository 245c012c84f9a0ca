"""Weights & Biases: the numbers of the records, by round.

The run has one identifier for good. A server knows which rounds it has; without one (WANDB_MODE=offline) they
are written anew from the records whenever the run is opened, and the earlier files are deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from feddumap.config import Config
from feddumap.errors import FeddumapError
from feddumap.runs.directory import RunDirectory
from feddumap.runs.trackers.base import numbers

PROJECT = "feddumap"


def require() -> Any:
    """The package; an error if it is not installed."""
    try:
        return import_module("wandb")
    except ImportError as error:
        raise FeddumapError(
            f"run.wandb = true needs the package wandb, which cannot be imported here ({error}): "
            "pip install 'feddumap[wandb]', or set it to false"
        ) from None


def start(directory: RunDirectory, config: Config, records: Sequence[Mapping[str, Any]]) -> Log:
    """The run at Weights & Biases, with the records so far."""
    package, token = require(), directory.token()
    for old in (directory.path / "wandb").glob(f"offline-run-*-{token}"):
        shutil.rmtree(old)
    quiet = package.Settings(
        silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
    )
    try:
        run = package.init(
            project=PROJECT,  # WANDB_PROJECT wins, like every variable of theirs
            name=directory.path.name,
            id=token,
            resume="allow",
            dir=str(directory.path),
            config=config.to_toml(),
            reinit="create_new",
            settings=quiet,
        )
    except Exception as error:  # of many kinds: no network, no key, no such project
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FeddumapError(
            f"run.wandb = true: Weights & Biases cannot be used ({reason}): run `wandb login`, or set "
            "WANDB_MODE=offline"
        ) from None
    log = Log(run)
    for record in records:
        log.add(record)
    return log


class Log:
    """A run at Weights & Biases."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._first = run.starting_step

    def add(self, record: Mapping[str, Any]) -> None:
        if record["round"] >= self._first:
            self._run.log(numbers(record), step=record["round"])

    def close(self) -> None:
        self._run.finish()
