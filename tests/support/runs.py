"""Runs that were interrupted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.sampling import select


def slow_cohort(config: Config, path: Path) -> dict[str, Any]:
    """The keys of [clock] with which no device of the first cohort meets the deadline, but all others do. The
    speeds are written to `path`."""
    chosen = select(config, 0)
    speeds = [1.0 if device in chosen else 1e15 for device in range(config.data.devices)]
    rows = [f"{device},{speed},{speed},{speed}" for device, speed in enumerate(speeds)]
    path.write_text("\n".join(["device,macs_per_second,down_mbit,up_mbit", *rows]))
    return {"profile": "general", "fleet": str(path), "deadline": 1.0}


def interrupted(config: Config, directory: Path, rounds: int) -> None:
    """Stop after some rounds, as a user who leaves the loop does."""
    run = api.start(config, directory)
    iterator = iter(run)
    for _ in range(rounds):
        next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    run.close()


def wait_for_records(directory: Path, count: int) -> float:
    """Wait until another process has written so many records; returns when that was seen."""
    records, until = directory / "records.jsonl", time.monotonic() + 60
    while not (records.exists() and records.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < until, f"{directory} has fewer than {count} records after a minute"
        time.sleep(0.002)
    return time.monotonic()
