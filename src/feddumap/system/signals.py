"""Handles SIGTERM like Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A context in which SIGTERM raises KeyboardInterrupt, so that runs are checkpointed and workers end."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(stop: KeyboardInterrupt) -> int:
    """The exit code of a command terminated by a signal, by shell convention.

    >>> exit_code(KeyboardInterrupt()), exit_code(KeyboardInterrupt(signal.SIGTERM))
    (130, 143)
    """
    return 128 + int(stop.args[0] if stop.args else signal.SIGINT)
