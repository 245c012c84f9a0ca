"""What `run.engine` names, for the commands that train."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from feddumap.errors import FeddumapError

if TYPE_CHECKING:
    from feddumap.run import Engine, Run


def engine_of(name: str) -> Callable[[Run], Engine] | None:
    """Who makes the cohort of a run: None for this machine's own processes. What could not be used is an
    error before anything has begun."""
    if name == "flower":
        raise FeddumapError(
            "run.engine = 'flower': expected local or ray here, as Flower's nodes train under its own "
            "commands; use `feddumap flower up`, or `flwr run` in a folder that `feddumap flower init` made"
        )
    if name != "ray":
        return None
    if find_spec("flwr") is None or find_spec("ray") is None:
        raise FeddumapError(
            "run.engine = 'ray' needs the packages flwr and ray, which are not installed: pip install "
            "'feddumap[ray]'"
        )
    from feddumap.flower.ray import simulated

    return simulated
