"""Configurations and comparisons for runs over Flower."""

from __future__ import annotations

from typing import Any

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.tensors import digest
from tests.conftest import small

DEVICES = 4


METHODS: dict[str, dict[str, Any]] = {
    "feddumap": {"prune_round": 2, "rate_nodes": "selected"},
    "prunefl": {"adjust_every": 2, "first_passes": 20},
    "fedda": {},
    "scaffold": {},
    "data-sharing": {"shared_samples": 20},
}


def config_of(method: str, engine: str = "flower", **sections: dict[str, Any]) -> Config:
    sections["run"] = {"engine": engine, "timeout": 0.4, **sections.get("run", {})}
    return small(
        data={"devices": DEVICES},
        method={"name": method, **METHODS.get(method, {})},
        **{"train": {"rounds": 4, "cohort": 3}, **sections},
    )


def alike(one: api.Run, other: api.Run) -> None:
    assert [{**record, "wall": 0} for record in one.records] == [{**r, "wall": 0} for r in other.records]
    assert digest(one.state.weights) == digest(other.state.weights)
    assert digest(one.state.steps) == digest(other.state.steps)
    assert digest(one.state.mask) == digest(other.state.mask)
