"""Types of the callbacks through which the library reports messages and progress."""

import sys
from collections.abc import Callable

from feddumap.errors import printable

Say = Callable[[str], None]
"""Called with a message for the user."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a task, how much of it is done, and the total (0 if unknown)."""

Steps = Callable[[int, int], None]
"""Called with how much of a task is done, and the total."""


def ignore(*_: object) -> None:
    """A `Say`, `Progress` or `Steps` that does nothing."""


def to_stderr(message: str) -> None:
    """A `Say` that prints."""
    print(printable(message), file=sys.stderr)
