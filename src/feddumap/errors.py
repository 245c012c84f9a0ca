"""The one error a user sees: a sentence that names the value, what was expected and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class FeddumapError(Exception):
    """Something the user can mend. The command line prints it and exits with code 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> FeddumapError:
    """The error for a name that is not in a table, with the nearest one that is.

    >>> print(unknown("method", "fedavgg", ["fedavg", "feddu"]))
    unknown method 'fedavgg': did you mean 'fedavg'? Known: fedavg, feddu
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return FeddumapError(f"unknown {kind} {name!r}: {hint}Known: {', '.join(names)}")
