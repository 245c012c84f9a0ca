"""What `run.engine` names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from feddumap.errors import FeddumapError

ENGINES = {"ray": "feddumap.flower.ray"}
"""Modules with a function `simulated(run)`, for the values of `run.engine` that name one."""


def engine_named(name: str) -> Callable[[Any], Any] | None:
    """What makes the cohort of a run: None for this machine's own processes. What cannot be used here is an
    error."""
    if name == "flower":
        raise FeddumapError(
            "run.engine = 'flower': expected local or ray here, as Flower's nodes train under its own "
            "commands; use `feddumap flower up`, or `flwr run` in a folder that `feddumap flower init` made"
        )
    if name not in ENGINES:
        return None
    missing = [package for package in ("flwr", "ray") if find_spec(package) is None]
    if missing:
        raise FeddumapError(
            f"run.engine = {name!r} needs the packages flwr and ray, but {' and '.join(missing)} cannot be "
            "found: pip install 'feddumap[ray]'"
        )
    make: Callable[[Any], Any] = import_module(ENGINES[name]).simulated
    return make
