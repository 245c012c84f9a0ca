"""Errors with a message for the user: the value, what was expected and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class FeddumapError(Exception):
    """An error the user can fix. The command line prints it and exits with code 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> FeddumapError:
    """The error for an unknown name, with the closest known one.

    >>> print(unknown("method", "fedavgg", ["fedavg", "feddu"]))
    unknown method 'fedavgg': did you mean 'fedavg'? Known: fedavg, feddu
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return FeddumapError(f"unknown {kind} {name!r}: {hint}Known: {', '.join(names)}")
