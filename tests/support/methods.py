"""Small runs of every method, and what identifies their outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.tensors import digest
from feddumap.methods import registry
from tests.conftest import small

QUICK: dict[str, Any] = {
    "prune_round": 1,
    "rate": "fixed",
    "fixed_rate": 0.5,
    "budget": "small",
    "adjust_every": 1,
    "first_passes": 20,
    "vote_epochs": 2,
    "subsets": 2,
}
"""Set where a method has the key, so that what it does once is done early and costs little."""


NAMES = sorted(registry.RECIPES)


every = pytest.mark.parametrize("name", NAMES)


def tiny(**sections: dict[str, Any]) -> Config:
    """A run of a few steps a device."""
    return small(data={"devices": 20}, train={"cohort": 2}).replace(**sections)


def config_of(name: str, **sections: dict[str, Any]) -> Config:
    known = {key for key, *_ in registry.keys(name)}
    quick = {key: value for key, value in QUICK.items() if key in known}
    return tiny(method={"name": name, **quick}).replace(**sections)


def bits(run: api.Run) -> str:
    mask = {f"mask/{name}": kept for name, kept in run.state.mask.items()}
    return digest({**run.state.weights, **run.state.steps, **mask})


def outcome(run: api.Run) -> tuple[str, list[dict[str, Any]]]:
    """Everything about a run but how long it took."""
    return bits(run), [{**record, "wall": 0} for record in run.records]


def resumed(config: Config, directory: Path, rounds: int) -> tuple[str, api.Run]:
    """A run left after some rounds, and opened again on one worker: its bits then, and the run at its end."""
    run = api.start(config, directory)
    iterator = run.iterate()
    for _ in range(rounds):
        next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    run.close()
    again = api.resume(directory, workers=1)
    assert (again.state.round, bits(again)) == (rounds, bits(run))
    again.run().close()
    return bits(run), again
