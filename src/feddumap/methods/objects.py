"""Methods given as Python objects; `feddumap.core.object_names` says what names they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from feddumap.core.algorithm import Algorithm
from feddumap.core.object_names import import_name, object_name
from feddumap.errors import FeddumapError

Build = Callable[..., Algorithm]

_OBJECTS: dict[str, Any] = {}


def register(given: Build | Algorithm) -> str:
    """The name of a function or an algorithm, under which this process and its forks find it."""
    if not isinstance(given, Algorithm) and not callable(given):
        raise FeddumapError(
            f"method = {given!r}: expected a method's name, a function that makes an Algorithm, or an "
            "Algorithm"
        )
    if imported := import_name(given):
        return imported
    name = object_name(given, _OBJECTS.get, "algorithm" if isinstance(given, Algorithm) else None)
    _OBJECTS[name] = given
    return name


def is_known(name: str) -> bool:
    """Whether an object was registered under a name in this process."""
    return name in _OBJECTS


def get(name: str) -> Any:
    """The object that was registered under a name in this process."""
    if name not in _OBJECTS:
        raise FeddumapError(
            f"method {name!r} is a Python object of the process that started the run: give it again from "
            "Python, or put it into a module and name it module:function"
        )
    return _OBJECTS[name]


def constant(algorithm: Algorithm) -> Build:
    """A function without parameters that makes an algorithm given as an object."""

    def build() -> Algorithm:
        """An algorithm given as an object."""
        return algorithm

    build.__module__ = "python"  # the algorithm is not of this package
    return build
