"""Parts of a method that can never act in a run, for messages at its start (`Algorithm.idle`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from feddumap.config import Config
from feddumap.core.algorithm import Context

Idle = Callable[[Context], Sequence[str]]

NEVER = {"prune_round": "nothing will be pruned", "adjust_every": "the mask will not be adjusted"}
"""Keys of methods that count rounds, and what happens in a run that has no more of them."""


def all_of(*parts: Idle) -> Idle:
    """What each of several parts says."""
    return lambda context: [sentence for part in parts for sentence in part(context)]


def never_reached(key: str, number: int) -> Idle:
    """Something that is done when as many rounds as a key of `NEVER` says have finished, in a run that has no
    more rounds."""
    return lambda context: _sentences({key: number}, context.config.train.rounds)


def unreached(config: Config) -> list[str]:
    """The sentences of `never_reached` about a run with this resolved configuration."""
    settings = config.method.settings
    return _sentences({key: settings[key] for key in NEVER if key in settings}, config.train.rounds)


def _sentences(numbers: Mapping[str, int], rounds: int) -> list[str]:
    all_rounds = "1 round" if rounds == 1 else f"{rounds:,} rounds"
    return [
        f"method.{key} = {number} is not reached in {all_rounds}: {NEVER[key]}"
        for key, number in numbers.items()
        if number >= rounds
    ]
