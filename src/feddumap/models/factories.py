"""Networks that are not built in: `module:factory`, `torchvision:NAME`, `timm:NAME`, those of other packages
(entry points), and functions registered in this process."""

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from torch import nn

from feddumap.core.messages import InputSpec
from feddumap.errors import FeddumapError
from feddumap.system.plugins import entry_points, load_entry, load_object

GROUP = "feddumap.models"
CLASSES = ("classes", "num_classes", "n_classes")
"""The names under which a factory may take the number of classes."""

Function = Callable[..., nn.Module]


class Factory:
    """A function that creates a network. It may take the number of classes, the form of the input
    (`input_shape`, `in_channels`, `vocabulary`) and settings: the keys of [model]."""

    def __init__(self, name: str, function: Function) -> None:
        self.name, self.function = name, function

    def __call__(self, classes: int, given: InputSpec, settings: Mapping[str, Any]) -> nn.Module:
        positional, keywords = self._arguments(classes, given, settings)
        try:
            made = self.function(*positional, **keywords)
        except FeddumapError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise FeddumapError(
                f"model.name = {self.name!r}: the factory failed ({first_line(error)}) for the input "
                f"{given.describe()} and {classes} classes: correct it or the keys of [model]"
            ) from error
        if not isinstance(made, nn.Module):
            raise FeddumapError(
                f"model.name = {self.name!r}: the factory returned {type(made).__name__}, expected a "
                "torch.nn.Module"
            )
        return made

    def _arguments(
        self, classes: int, given: InputSpec, settings: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], dict[str, Any]]:
        for key in CLASSES:
            if key in settings:
                raise FeddumapError(
                    f"model.{key} = {settings[key]!r}: the data set decides the number of classes "
                    f"({classes}); remove the key"
                )
        try:
            parameters = signature(self.function).parameters
        except (TypeError, ValueError):  # functions written in C
            return (classes,), dict(settings)
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        named = [p.name for p in parameters.values() if p.kind in by_name]
        if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
            for key in settings:
                if key not in named:
                    allowed = ", ".join(n for n in named if n not in CLASSES) or "none"
                    raise FeddumapError(f"unknown key model.{key}: {self.name} takes {allowed}")
        form = {"input_shape": given.shape, "in_channels": given.shape[0], "vocabulary": given.vocabulary}
        keywords = {key: value for key, value in form.items() if key in named} | dict(settings)
        for key in CLASSES:
            if key in named:
                return (), {**keywords, key: classes}
        for p in parameters.values():  # the first that nothing else fills
            if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
                return (classes,), keywords
            if p.kind in by_name and p.default is Parameter.empty and p.name not in keywords:
                return (), {**keywords, p.name: classes}
        return (), keywords


def find(name: str) -> Function | None:
    """The function behind a name; None if there is no such name."""
    library, colon, rest = name.partition(":")
    if not colon:
        entry = entry_points(GROUP).get(name)
        function = None if entry is None else load_entry(entry, "model")
    elif library in LIBRARIES:
        return LIBRARIES[library](name, rest)
    else:
        function = load_object(name, "model")
    if function is not None and not callable(function):
        raise FeddumapError(
            f"model.name = {name!r} is of type {type(function).__name__}: expected a function or class that "
            "creates the network"
        )
    made: Function | None = function
    return made


def names() -> list[str]:
    """The networks of other packages."""
    return list(entry_points(GROUP))


def without_weights(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for a network whose weights are loaded afterwards: nothing is downloaded for it."""
    library = name.partition(":")[0] in LIBRARIES
    return {key: value for key, value in settings.items() if not (library and key == "pretrained")}


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _package(name: str, package: str) -> Any:
    try:
        return import_module(package)
    except Exception as error:  # also a build for another torch
        raise FeddumapError(
            f"model.name = {name!r} needs the package {package}, which cannot be imported "
            f"({first_line(error)}): pip install 'feddumap[{package}]'"
        ) from error


def _torchvision(name: str, rest: str) -> Function:
    models = _package(name, "torchvision").models

    def create(classes: int, *, pretrained: bool = False, **settings: Any) -> nn.Module:
        if not pretrained:
            made: nn.Module = models.get_model(rest, weights=None, num_classes=classes, **settings)
            return made
        return with_outputs(models.get_model(rest, weights="DEFAULT", **settings), classes)

    return create


def _timm(name: str, rest: str) -> Function:
    timm = _package(name, "timm")

    def create(classes: int, in_channels: int, *, pretrained: bool = False, **settings: Any) -> nn.Module:
        made: nn.Module = timm.create_model(
            rest, pretrained=pretrained, num_classes=classes, in_chans=in_channels, **settings
        )
        return made

    return create


def with_outputs(network: nn.Module, classes: int) -> nn.Module:
    """The network with a new last linear layer, unless it has that many outputs."""
    linear = [(name, module) for name, module in network.named_modules() if type(module) is nn.Linear]
    if linear and linear[-1][1].out_features != classes:
        name, last = linear[-1]
        new = nn.Linear(last.in_features, classes, bias=last.bias is not None)
        network.set_submodule(name, new)
    return network


LIBRARIES: dict[str, Callable[[str, str], Function]] = {"torchvision": _torchvision, "timm": _timm}
"""Packages of networks: the function that makes a factory of `package:NAME`."""
