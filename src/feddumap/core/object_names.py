"""Names of what a Python program passes as an object: a network, a method, a data set.

A function or class that other processes can import is named `module:name`. Anything else is named `python:`
and its qualified name. A second object of that name in this process gets `-2` and so on; run directories
leave that out, so that a program that passes its objects again finds its run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import reduce
from itertools import count
from typing import Any

PREFIX = "python:"


def is_object(name: str) -> bool:
    """Whether a name is that of an object, which only the program that passes it knows."""
    return name.startswith(PREFIX)


def stored_name(name: str) -> str:
    """The name in run directories.

    >>> stored_name("python:Net-2"), stored_name("my_nets:make")
    ('python:Net', 'my_nets:make')
    """
    return re.sub(r"-\d+$", "", name) if is_object(name) else name


def import_name(value: object) -> str | None:
    """`module:name` of a function or class that other processes find under this name; else None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return None
    loaded = sys.modules.get(module)
    try:
        if loaded is None or reduce(getattr, name.split("."), loaded) is not value:
            return None
    except AttributeError:
        return None
    return f"{module}:{name}" if _is_importable(module, getattr(loaded, "__file__", None)) else None


def _is_importable(module: str, file: str | None) -> bool:
    """Whether another process that imports the module loads the same file."""
    path: Any = None
    spec = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        found = (finder.find_spec(".".join(parts[:end]), path) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == file


def object_name(value: object, known: Callable[[str], Any], called: str | None = None) -> str:
    """`python:NAME` of an object; `known(name)` is the object that has the name in this process, or None."""
    first = PREFIX + (called or getattr(value, "__qualname__", None) or type(value).__qualname__)
    names = (first if number == 1 else f"{first}-{number}" for number in count(1))
    return next(name for name in names if (other := known(name)) is None or other is value)
