"""Ctrl-C and SIGTERM end a command in the same way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM leaves a run as Ctrl-C does: checkpointed, its workers ended."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(stop: KeyboardInterrupt) -> int:
    """What a shell expects of a command that a signal ended.

    >>> exit_code(KeyboardInterrupt()), exit_code(KeyboardInterrupt(signal.SIGTERM))
    (130, 143)
    """
    return 128 + int(stop.args[0] if stop.args else signal.SIGINT)
