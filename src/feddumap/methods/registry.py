"""The table of methods, the keys of `[method]` that each has, and `compose`, which builds an algorithm.

A method's name in a configuration is one of the table's, one that another package offers through the entry
points `feddumap.methods`, a user's `module:function`, or `python:NAME` for an object of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from feddumap import attacks, screening
from feddumap.config import Config, MethodConfig, explain, type_name
from feddumap.core.algorithm import Algorithm
from feddumap.core.object_names import is_object
from feddumap.errors import FeddumapError, unknown
from feddumap.methods import objects, signature
from feddumap.methods.guard import call, guarded
from feddumap.methods.signature import Settings as Settings
from feddumap.system import plugins

GROUP = "feddumap.methods"
"""The entry points through which other packages offer methods."""

Build = Callable[..., Algorithm]


@dataclass(frozen=True)
class Recipe:
    """A method's name, the function that composes it from its keys, and where it comes from."""

    name: str
    build: Build
    origin: str = "feddumap"

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return next(iter((self.build.__doc__ or "").strip().splitlines()), "")

    @property
    def trusted(self) -> bool:
        """Whether the method is part of this package, so that what it returns need not be checked."""
        return str(getattr(self.build, "__module__", "")).startswith("feddumap.")


RECIPES: dict[str, Recipe] = {}
"""The methods of this package."""

_OWN: dict[str, Build] = {}
"""Methods that the user's code has given a name."""


def method(name: str) -> Callable[[Build], Build]:
    """Give a function that makes an `Algorithm` the name of a method. Its parameters are the method's keys,
    and the first line of its docstring is the summary."""

    def register(build: Build) -> Build:
        recipe = Recipe(name, build)
        if recipe.trusted:
            RECIPES[name] = recipe
        elif name in RECIPES or ":" in name:
            raise FeddumapError(f"the method name {name!r} is taken or has a colon: choose another")
        else:
            _OWN[name] = build
        return build

    return register


def arrange(names: Sequence[str]) -> None:
    """Put the table into this order, in which it is listed; `names` has every method once."""
    assert sorted(names) == sorted(RECIPES), set(names) ^ set(RECIPES)
    for name in names:
        RECIPES[name] = RECIPES.pop(name)


def find(name: str) -> Recipe:
    """The method of a name. One that is not of the table is imported; its own name is the one under which
    other processes find it."""
    if name in RECIPES:
        return RECIPES[name]
    if name in _OWN:
        return Recipe(register_object(_OWN[name]), _OWN[name], "this process")
    if is_object(name):
        return Recipe(name, _checked(name, objects.get(name)), "this process")
    if ":" in name:
        return Recipe(name, _checked(name, plugins.load_object(name, "method")), name.partition(":")[0])
    offered = plugins.entry_points(GROUP)
    if name not in offered:
        raise unknown("method", name, [*RECIPES, *_OWN, *offered, "module:function of your own"])
    entry = offered[name]
    return Recipe(name, _checked(name, plugins.load_entry(entry, "method")), plugins.origin(entry))


def register_object(given: Build | Algorithm) -> str:
    """The name in configurations of a function that makes an algorithm, or of an algorithm itself."""
    for name, recipe in RECIPES.items():
        if recipe.build is given:
            return name
    return objects.register(given)


def _checked(name: str, value: Any) -> Build:
    if isinstance(value, Algorithm):
        return objects.constant(value)
    if not callable(value):
        raise FeddumapError(
            f"method {name!r} is {value!r}: expected a function that makes an Algorithm, or an Algorithm"
        )
    build: Build = value
    return build


def settings_model(name: str) -> type[BaseModel]:
    """All keys of a method in one model."""
    return signature.settings_model(find(name).build)


def resolve(config: MethodConfig) -> MethodConfig:
    """Check the method's keys and fill in its defaults."""
    recipe = find(config.name)
    model = signature.settings_model(recipe.build)
    try:
        settings = model.model_validate(config.settings)
    except ValidationError as error:
        known = list(model.model_fields)
        sentences = dict.fromkeys(_explain(detail, config.name, known) for detail in error.errors())
        raise FeddumapError("; ".join(sentences)) from None
    return MethodConfig.model_validate({"name": recipe.name, **settings.model_dump(exclude_none=True)})


def with_defaults(stored: MethodConfig) -> MethodConfig:
    """The method of a finished run with the defaults of keys that older versions did not have. A method that
    is not of this package is taken as it is stored, since its code may be gone."""
    return resolve(stored) if stored.name in RECIPES else stored


def _explain(detail: Any, method: str, known: list[str]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "missing":
        return f"method.{detail['loc'][0]} is missing: {method} has no default for it; set it"
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
    """A method's keys as (key, type, default, description); the default of a required key is None."""
    return [
        (
            key,
            type_name(info.annotation),
            None if info.is_required() else info.default,
            info.description or "",
        )
        for key, info in settings_model(name).model_fields.items()
    ]


def compose(config: Config) -> Algorithm:
    """The algorithm that a configuration names, with its keys checked and defaults filled in, the screening
    of its uploads and simulated hostile devices. What the slots of a method of the user's own return is
    checked whenever they are called."""
    resolved = resolve(config.method)
    recipe = find(resolved.name)
    given = signature.arguments(recipe.build, resolved.settings)
    if recipe.trusted:
        made = algorithm = recipe.build(**given)
    else:
        made = call(recipe.name, "function", recipe.build, **given)
        algorithm = guarded(made, recipe.name)
    checked = config.model_copy(update={"method": resolved})
    return attacks.of(config, screening.screened(checked, algorithm, made, recipe.trusted))
