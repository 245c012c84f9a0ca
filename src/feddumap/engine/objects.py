"""Networks and methods that a Python program passes as objects: they get names, under which this process and
worker processes forked from it find them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from feddumap.config import Config
from feddumap.core.object_names import import_name, is_object, object_name
from feddumap.errors import FeddumapError
from feddumap.methods import Method
from feddumap.methods import registry as methods
from feddumap.methods.objects import is_known
from feddumap.models import registry as models


def used(config: Config) -> bool:
    """Whether the network or the method of a run is an object. Data is not asked for: workers map it."""
    return is_object(config.model.name) or is_object(config.method.name)


def check(config: Config) -> None:
    """Raise an error if an object that a configuration names was not passed to this process, or cannot be
    sent to where devices run."""
    known = {
        "model": config.model.name in models.families(),
        "method": is_known(config.method.name),
        "data": True,  # the catalog knows
    }
    for part, passed in known.items():
        name = getattr(config, part).name
        if not is_object(name):
            continue
        if not passed:
            raise _not_passed(part, name)
        if config.run.engine != "local":
            raise FeddumapError(
                f"run.engine = {config.run.engine!r} cannot send {part}.name = {name!r}, an object of this "
                f"program, to other processes: put it into a module and give its name, module:name"
            )


def require_none(config: Config) -> None:
    """Raise an error if a configuration names a network or method that is an object, in a call that cannot
    pass one: another object may have that name in this process."""
    for part in ("model", "method"):
        name = getattr(config, part).name
        if is_object(name):
            raise _not_passed(part, name)


def _not_passed(part: str, name: str) -> FeddumapError:
    return FeddumapError(
        f"{part}.name = {name!r} is an object of a Python program: go on from there, with "
        f"feddumap.Run({part}=…, out=…)"
    )


def model_keys(given: object) -> dict[str, Any]:
    """The keys of [model] for a name, a mapping with a name, a factory or a network."""
    if isinstance(given, Mapping):
        if "name" not in given:
            raise FeddumapError(f"model={dict(given)!r} has no name: expected a name, a factory or a network")
        return {**given, **model_keys(given["name"])}
    if isinstance(given, str):
        return {"name": given}
    if isinstance(given, nn.Module):
        first = deepcopy(given)

        def copied(classes: int) -> nn.Module:
            return deepcopy(first)

        copied.__qualname__ = type(given).__qualname__
        return {"name": _registered_model(copied)}
    if not callable(given):
        raise FeddumapError(
            f"model={given!r}: expected a name, a factory (a function or class that is called with the "
            "number of classes) or a network (an nn.Module)"
        )
    return {"name": import_name(given) or _registered_model(given)}


def _registered_model(factory: Callable[..., nn.Module]) -> str:
    name = object_name(factory, models.factory_of)
    models.register(name, factory)
    return name


def method_keys(given: Any) -> dict[str, Any]:
    """The keys of [method] for a name, a mapping with a name, a function that makes an `Algorithm`, an
    `Algorithm`, or a `Method`."""
    if isinstance(given, Mapping):
        if "name" not in given:
            raise FeddumapError(f"method={dict(given)!r} has no name: expected a name or a function")
        return {**given, **method_keys(given["name"])}
    if isinstance(given, str):
        return {"name": given}
    if isinstance(given, Method):
        return {"name": given.name, **given.settings}
    return {"name": methods.register_object(given)}


def plain(value: Any) -> Any:
    """A value of a key as a configuration holds it: paths as text, tuples as lists, numbers of numpy as
    Python's.

    >>> import numpy as np
    >>> plain((np.float64(0.5), np.int64(2)))
    [0.5, 2]
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return value.item() if hasattr(value, "item") and callable(value.item) else value
