"""The keys of `[method]` that a method has: the parameters of the function that composes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import Parameter
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.errors import PydanticUserError

from feddumap.errors import FeddumapError


class Settings(BaseModel):
    """A group of `[method]` keys, for a parameter that stands for several keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


@lru_cache(maxsize=512)
def settings_model(build: Callable[..., Any]) -> type[BaseModel]:
    """All keys of a method in one model: the fields of its groups, and its other parameters."""
    name = _name(build)
    groups = []
    fields: dict[str, Any] = {}
    for parameter in _parameters(build):
        if _is_group(parameter):
            groups.append(parameter.annotation)
        else:
            default = ... if parameter.default is Parameter.empty else parameter.default
            fields[parameter.name] = (parameter.annotation, default)
    known = [key for group in groups for key in group.model_fields]
    for key in fields:
        if key in known or key == "name" or key.startswith("_"):
            raise FeddumapError(f"{name} cannot have a parameter {key!r}: the name is taken; choose another")
    try:
        return create_model(f"{name}-settings", __base__=tuple(groups) or Settings, **fields)
    except PydanticUserError as error:
        shown = ", ".join(f"{key}: {kind}" for key, (kind, _) in fields.items())
        raise FeddumapError(
            f"the parameters of {name} ({shown}) cannot be keys of [method] ({str(error).splitlines()[0]}): "
            "annotate them with types such as float, int, bool, str or list[float]"
        ) from None


def arguments(build: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a method's function, from its checked keys."""
    checked = settings_model(build).model_validate(settings)
    found: dict[str, Any] = {}
    for parameter in _parameters(build):
        if _is_group(parameter):
            group: type[Settings] = parameter.annotation
            own = {key: settings[key] for key in group.model_fields if key in settings}
            found[parameter.name] = group.model_validate(own)
        else:
            found[parameter.name] = getattr(checked, parameter.name)
    return found


def _is_group(parameter: Parameter) -> bool:
    return isinstance(parameter.annotation, type) and issubclass(parameter.annotation, Settings)


def _parameters(build: Callable[..., Any]) -> list[Parameter]:
    name = _name(build)
    try:
        found = list(inspect.signature(build, eval_str=True).parameters.values())
    except (NameError, TypeError, ValueError, SyntaxError) as error:
        raise FeddumapError(
            f"the parameters of {name} cannot be read ({error}): expected a function whose annotations are "
            "types that its module knows"
        ) from None
    for parameter in found:
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise FeddumapError(
                f"{name} has the parameter {str(parameter)!r}: expected named parameters with a type, which "
                "are its keys of [method]"
            )
        if parameter.annotation is Parameter.empty:
            raise FeddumapError(
                f"the parameter {parameter.name!r} of {name} has no type: annotate it, such as "
                f"{parameter.name}: float = 0.1, so that method.{parameter.name} can be checked"
            )
    return found


def _name(build: Callable[..., Any]) -> str:
    return str(getattr(build, "__qualname__", None) or repr(build))
