"""The table of methods, the keys of `[method]` that each has, and `compose`, which builds an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from feddumap.config import Config, MethodConfig, explain, type_name
from feddumap.core.algorithm import Algorithm
from feddumap.errors import FeddumapError, unknown


class Settings(BaseModel):
    """A group of `[method]` keys. A recipe's parameters are groups; their fields together are its keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True)
class Recipe:
    """A method's name, its one-line description and the function that composes it from groups of keys."""

    name: str
    summary: str
    build: Callable[..., Algorithm]

    @property
    def groups(self) -> list[type[Settings]]:
        hints = get_type_hints(self.build)
        return [hint for name, hint in hints.items() if name != "return"]


RECIPES: dict[str, Recipe] = {}


def recipe(name: str) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Register a function under a method's name; the first line of its docstring is the summary."""

    def register(build: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        RECIPES[name] = Recipe(name, (build.__doc__ or "").strip().splitlines()[0], build)
        return build

    return register


def arrange(names: Sequence[str]) -> None:
    """Put the table into this order, in which it is listed; `names` has every method once."""
    assert sorted(names) == sorted(RECIPES), set(names) ^ set(RECIPES)
    for name in names:
        RECIPES[name] = RECIPES.pop(name)


def find(name: str) -> Recipe:
    """A recipe of the table, or a user's own, given as `module:function`.

    Worker processes import the latter for themselves; it is not added to the table.
    """
    if name in RECIPES:
        return RECIPES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise unknown("method", name, [*RECIPES, "module:function of your own"])
    try:
        build = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise FeddumapError(
            f"method {name!r} cannot be imported ({error}): expected module:function, where function makes "
            "an Algorithm and the module can be imported here"
        ) from error
    return Recipe(name, "", build)


@cache
def settings_model(name: str) -> type[BaseModel]:
    """All keys of a method in one model."""
    return create_model(f"{name}-settings", __base__=tuple(find(name).groups) or Settings)


def resolve(config: MethodConfig) -> MethodConfig:
    """Check the method's keys and fill in its defaults."""
    model = settings_model(config.name)
    try:
        settings = model.model_validate(config.settings)
    except ValidationError as error:
        known = list(model.model_fields)
        sentences = dict.fromkeys(_explain(detail, config.name, known) for detail in error.errors())
        raise FeddumapError("; ".join(sentences)) from None
    return MethodConfig.model_validate({"name": config.name, **settings.model_dump(exclude_none=True)})


def settings_of(method: MethodConfig) -> list[Settings]:
    """A resolved method's keys, in the groups its recipe takes."""
    values = method.settings
    return [
        group.model_validate({key: values[key] for key in group.model_fields if key in values})
        for group in find(method.name).groups
    ]


def _explain(detail: Any, method: str, known: list[str]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] != "extra_forbidden":
        detail["loc"] = ("method", detail["loc"][0])  # what follows names a branch of a union
        return explain(detail)
    key = str(detail["loc"][-1])
    if not known:
        return f"unknown key method.{key}: {method} has no keys but name"
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean method.{near[0]}? " if near else ""
    return f"unknown key method.{key}: {hint}Keys of {method}: {', '.join(known)}"


def keys(name: str) -> list[tuple[str, str, Any, str]]:
    """A method's keys as (key, type, default, description)."""
    return [
        (key, type_name(info.annotation), info.default, info.description or "")
        for key, info in settings_model(name).model_fields.items()
    ]


def compose(config: Config) -> Algorithm:
    """The algorithm that a configuration names, with its keys checked and defaults filled in."""
    method = resolve(config.method)
    return find(method.name).build(*settings_of(method))
