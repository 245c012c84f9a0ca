"""A method with its settings as a value: what `feddumap.methods.feddumap(c=1.0)` returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

from feddumap.config import MethodConfig
from feddumap.core.algorithm import Algorithm
from feddumap.methods import signature
from feddumap.methods.registry import RECIPES, Build, register_object, resolve


@dataclass(frozen=True, init=False)
class Method:
    """A method by name, by a function that makes its `Algorithm`, or by the algorithm; and its settings.

    >>> Method("fedprox", mu=0.1)
    Method('fedprox', mu=0.1)
    """

    method: str | Build | Algorithm
    settings: Mapping[str, Any]

    def __init__(self, method: str | Build | Algorithm, /, **settings: Any) -> None:
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "settings", settings)
        resolve(self.config)  # an unknown key is an error here

    @property
    def name(self) -> str:
        """The method's name in a configuration."""
        return self.method if isinstance(self.method, str) else register_object(self.method)

    @property
    def config(self) -> MethodConfig:
        """The section [method] of a configuration."""
        return MethodConfig.model_validate({"name": self.name, **self.settings})

    def __repr__(self) -> str:
        given = [repr(self.name), *(f"{key}={value!r}" for key, value in self.settings.items())]
        return f"Method({', '.join(given)})"


def public(build: Build) -> Callable[..., Method]:
    """The function that makes a `Method` of a method of the table; its parameters are the method's keys."""
    recipe = next(recipe for recipe in RECIPES.values() if recipe.build is build)

    def make(**settings: Any) -> Method:
        return Method(recipe.name, **settings)

    fields = signature.settings_model(build).model_fields
    described = [f"    {key}: {info.description}" for key, info in fields.items()]
    make.__name__ = make.__qualname__ = recipe.name.replace("-", "_")
    make.__doc__ = "\n".join([recipe.summary, *([""] if described else []), *described])
    parameters = [
        Parameter(
            key,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if info.is_required() else info.default,
            annotation=info.annotation,
        )
        for key, info in fields.items()
    ]
    make.__signature__ = Signature(parameters, return_annotation=Method)  # type: ignore[attr-defined]
    assert inspect.signature(make).parameters.keys() == fields.keys()
    return make
