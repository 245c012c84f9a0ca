"""The configuration of a run that Python describes by arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddumap import config as configuration
from feddumap.config import Config
from feddumap.core.object_names import is_object as is_object
from feddumap.data.in_memory import InMemoryDataset
from feddumap.engine.objects import method_keys, model_keys, plain
from feddumap.errors import FeddumapError, unknown

SECTIONS = ("data", "train", "clock", "run")
OWN = ("name",)
"""Keys that several sections have; `model`, `data` and `method` set them."""


def sections_of_keys() -> dict[str, str]:
    """The section of each key that has a name of its own."""
    found = {"weights": "model"}
    for section in SECTIONS:
        model = Config.model_fields[section].annotation
        assert isinstance(model, type)
        for key in model.model_fields:
            if key not in OWN:
                assert key not in found, f"{key} is in two sections"
                found[key] = section
    return found


def base_config(given: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """A configuration given as such, as nested mappings, or as the path of a file; None for the defaults."""
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return Config.parse(given)
    return configuration.load(Path(given) if given is not None else None)


def configure(base: Config, model: Any, data: Any, method: Any, keys: Mapping[str, Any]) -> Config:
    """The base with a model, data and a method, where given, and further keys by their own names."""
    sections: dict[str, dict[str, Any]] = {}
    known = sections_of_keys()
    for key, value in keys.items():
        if key not in known:
            raise unknown("argument of Run", key, [*known, "model", "data", "method", "config", "out"])
        sections.setdefault(known[key], {})[key] = plain(value)
    value = base.model_dump(exclude_unset=True)  # whether a key was given matters to some defaults
    for part, made in (("model", model), ("method", method), ("data", data)):
        if made is not None:
            named = {"model": model_keys, "method": method_keys, "data": data_keys}[part](made)
            fresh = value.get(part, {}) if part == "data" else {}
            if part == "model" and base.model.weights is not None:
                fresh = {"weights": base.model.weights}
            value[part] = {**fresh, **{key: plain(each) for key, each in named.items()}}
    for section, changed in sections.items():
        value.setdefault(section, {}).update(changed)
    return Config.parse(value)


def data_keys(given: Any) -> dict[str, Any]:
    """The keys of [data] for a name, a path, a mapping with a name, or a data set in memory."""
    if isinstance(given, Mapping):
        return {**given, **(data_keys(given["name"]) if "name" in given else {})}
    if isinstance(given, str | Path):
        return {"name": str(given)}
    if not isinstance(given, InMemoryDataset):
        raise FeddumapError(
            f"data={given!r}: expected a name, a path, or feddumap.Dataset(train=(x, y), test=(x, y))"
        )
    return {"name": given.config_name}
