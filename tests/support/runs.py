"""Runs that were interrupted."""

from __future__ import annotations

from pathlib import Path

from feddumap import run as api
from feddumap.config import Config


def interrupted(config: Config, directory: Path, rounds: int) -> None:
    """Stop after some rounds, as a user who leaves the loop does."""
    run = api.start(config, directory)
    iterator = iter(run)
    for _ in range(rounds):
        next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    run.close()
