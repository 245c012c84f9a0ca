"""Data sets that code makes: `module:function` of the user, or an entry point of another package."""

from __future__ import annotations

from feddumap.data.dataset import Contents
from feddumap.data.in_memory import InMemoryDataset
from feddumap.errors import FeddumapError
from feddumap.system.plugins import entry_points, load_entry, load_object, location, show_tracebacks

GROUP = "feddumap.data"


def names() -> list[str]:
    """The data sets that installed packages offer."""
    return list(entry_points(GROUP))


def is_code(name: str) -> bool:
    """Whether a name is `module:function`."""
    return ":" in name and not name.startswith(("hub:", "python:"))


def make(name: str) -> Contents:
    """Call the function that a name means; it takes no argument and returns a `Dataset` or `Contents`."""
    if is_code(name):
        function = load_object(name, "function")
    else:
        function = load_entry(entry_points(GROUP)[name], "data set")
    if not callable(function):
        raise FeddumapError(f"data.name = {name!r} is not a function: expected one that makes a data set")
    try:
        found = function()
    except FeddumapError:
        raise
    except Exception as error:
        if show_tracebacks():
            raise
        reason = location(error, f"{type(error).__name__}: {error}")
        raise FeddumapError(f"the data set {name} cannot be made ({reason}): correct its function") from error
    if isinstance(found, InMemoryDataset):
        return found.contents()
    if isinstance(found, Contents):
        return found
    raise FeddumapError(
        f"data.name = {name!r} returned a {type(found).__name__}: expected a feddumap.Dataset or Contents"
    )
