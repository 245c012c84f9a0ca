"""Parts of a method that can never act in a run, for messages at its start (`Algorithm.idle`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from feddumap.core.algorithm import Context

Idle = Callable[[Context], Sequence[str]]


def all_of(*parts: Idle) -> Idle:
    """What each of several parts says."""
    return lambda context: [sentence for part in parts for sentence in part(context)]


def never_reached(key: str, number: int, consequence: str) -> Idle:
    """Something that is done when `number` rounds have finished, in a run that has no more rounds."""

    def idle(context: Context) -> list[str]:
        rounds = context.config.train.rounds
        return (
            [] if number < rounds else [f"{key} = {number} is not reached in {rounds} rounds: {consequence}"]
        )

    return idle
