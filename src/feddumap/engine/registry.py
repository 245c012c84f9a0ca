"""The engines that `run.engine` can name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from feddumap.errors import FeddumapError

ENGINES = {"ray": "feddumap.flower.ray"}
"""Engine modules by the value of `run.engine`; each has a function `simulated(run)`."""


def get_engine(name: str) -> Callable[[Any], Any] | None:
    """The factory of a run's cohort, None for processes of this machine; an error if it is not available."""
    if name == "flower":
        raise FeddumapError(
            "run.engine = 'flower': expected local or ray, since a federation is started by other "
            "commands: use `feddumap flower up`, or `flwr run` in a folder that `feddumap flower init` made"
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
