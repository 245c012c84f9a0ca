"""Every named method, as a composition of slots. A recipe's parameters are the keys of `[method]`.

To add a method: write the function it needs in its slot, add a recipe here, and every invariant test runs
over it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from feddumap.algorithm import Algorithm
from feddumap.config import Config, MethodConfig, explain, type_name
from feddumap.device.local import local_sgd
from feddumap.errors import FeddumapError, unknown


@dataclass(frozen=True)
class Recipe:
    """A method's name, its one-line description and the function that composes it."""

    name: str
    summary: str
    build: Callable[..., Algorithm]


RECIPES: dict[str, Recipe] = {}


def recipe(name: str) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Enter a function under a method's name; its docstring's first line is the summary."""

    def enter(build: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        RECIPES[name] = Recipe(name, (build.__doc__ or "").strip().splitlines()[0], build)
        return build

    return enter


@recipe("fedavg")
def fedavg() -> Algorithm:
    """Federated averaging: devices train with SGD, the server takes the weighted mean (McMahan et al.)."""
    return Algorithm(local=local_sgd())


@cache
def settings_model(name: str) -> type[BaseModel]:
    """The keys of a method as a model, from the recipe's parameters."""
    if name not in RECIPES:
        raise unknown("method", name, RECIPES)
    build = RECIPES[name].build
    hints = get_type_hints(build, include_extras=True)
    fields: dict[str, Any] = {
        key: (hints[key], parameter.default) for key, parameter in inspect.signature(build).parameters.items()
    }
    strict = ConfigDict(extra="forbid", strict=True, frozen=True)
    return create_model(f"{name}-settings", __config__=strict, **fields)


def resolve(config: MethodConfig) -> MethodConfig:
    """Check the method's keys and fill in its defaults."""
    model = settings_model(config.name)
    try:
        settings = model.model_validate(config.settings)
    except ValidationError as error:
        keys = list(model.model_fields)
        raise FeddumapError(
            "; ".join(_explain(detail, config.name, keys) for detail in error.errors())
        ) from None
    return MethodConfig.model_validate({"name": config.name, **settings.model_dump(exclude_none=True)})


def _explain(detail: Any, method: str, keys: list[str]) -> str:
    if detail["type"] != "extra_forbidden":
        return explain(detail, "method.")
    key = str(detail["loc"][-1])
    if not keys:
        return f"unknown key method.{key}: {method} has no keys but name"
    return str(unknown("key", f"method.{key}", [f"method.{name}" for name in keys]))


def compose(config: Config) -> Algorithm:
    """The algorithm a configuration names."""
    method = resolve(config.method)
    return RECIPES[method.name].build(**method.settings)


def keys(name: str) -> list[tuple[str, str, Any, str]]:
    """A method's keys as (key, type, default, description)."""

    def row(key: str, info: FieldInfo) -> tuple[str, str, Any, str]:
        return key, type_name(info.annotation), info.default, info.description or ""

    return [row(key, info) for key, info in settings_model(name).model_fields.items()]
