"""The methods that can be named in a configuration: those of this package and of other installed ones."""

from __future__ import annotations

from typing import Any

from feddumap.errors import FeddumapError
from feddumap.methods.registry import GROUP, RECIPES, find, keys
from feddumap.system import plugins


def listed() -> tuple[list[dict[str, Any]], list[str]]:
    """Every method with its origin, summary and keys, and a sentence for each that cannot be used."""
    found = [described(name) for name in RECIPES]
    broken = []
    for name, entry in plugins.entry_points(GROUP).items():
        if name in RECIPES:
            broken.append(
                f"method {name!r} of {plugins.origin(entry)} cannot be used: feddumap has a method of that "
                "name"
            )
            continue
        try:
            found.append(described(name))
        except FeddumapError as error:
            broken.append(str(error))
    return found, broken


def described(name: str) -> dict[str, Any]:
    """A method with its origin, summary and keys."""
    recipe = find(name)
    settings = {
        key: {"type": kind, "default": default, "description": text}
        for key, kind, default, text in keys(name)
    }
    return {"name": name, "summary": recipe.summary, "from": recipe.origin, "keys": settings}
