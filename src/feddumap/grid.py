"""A grid: many runs described by one file. Its cells are the product of the swept values, each checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from feddumap import api
from feddumap.config import Config, load, read_toml
from feddumap.errors import FeddumapError
from feddumap.menu import RECIPES, resolve, settings_model
from feddumap.runs import read_config, refuse_existing

PLAIN = ("method.name", "model.name", "data.name", "run.seed")  # values that need no key beside them
LONGEST = 120  # characters of a cell's name


@dataclass(frozen=True)
class Cell:
    """One run of a grid: its name, its directory, what was swept, its configuration and its rounds."""

    name: str
    path: Path
    swept: Mapping[str, Any]
    config: Config
    rounds: int

    @property
    def kind(self) -> str:
        """Cells of a kind take about as long."""
        return f"{self.config.model.name} on {self.config.data.name}"


def read(file: Path, sets: Iterable[str] = ()) -> tuple[Config, dict[str, list[Any]], list[Any]]:
    """What all cells have in common, the values of every swept key, and the methods that the file names. A
    --set of a swept key keeps that value alone."""
    table = read_toml(file, "grid")
    swept = _sweeps(file, table.pop("grid", None))
    methods = swept.get("method.name", [Config.parse(table).method.name])
    for section, keys in load(None, sets).model_dump(exclude_unset=True).items():
        for key, value in keys.items():
            values = swept.get(f"{section}.{key}")
            if values is None:
                table.setdefault(section, {})[key] = value
            else:
                kept = [each for each in values if each == value] or [value]
                swept[f"{section}.{key}"] = _all(f"{section}.{key}", value) or kept
    return Config.parse(table), swept, methods


def _sweeps(file: Path, table: Any) -> dict[str, list[Any]]:
    if not isinstance(table, dict) or not table:
        raise FeddumapError(
            f'{file} has no table [grid]: give one with what to vary, such as "run.seed" = [1, 2, 3]'
        )
    flat: dict[str, Any] = {}
    for key, value in table.items():  # a key without quotes is a table within the table
        flat |= (
            {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
        )
    flat = {key: _all(key, value) or value for key, value in flat.items()}
    for key, values in flat.items():
        if "." not in key:
            raise FeddumapError(f"grid key {key!r}: expected section.key, such as train.rounds")
        if not isinstance(values, list) or not values:
            raise FeddumapError(f"grid key {key} = {values!r}: expected a list of values, such as [1, 2]")
    if "run.workers" in flat:
        raise FeddumapError("grid key run.workers changes no result: take it out, and use --jobs")
    return flat


def _all(key: str, value: Any) -> list[str] | None:
    """The methods that "all" stands for."""
    return list(RECIPES) if (key, value) == ("method.name", "all") else None


def cells(
    file: Path, out: Path, sets: Iterable[str] = (), say: Callable[[str], None] = lambda _: None
) -> list[Cell]:
    """The cells, in the order of the product: each checked as if it were about to be trained, and against
    what its directory holds already."""
    base, swept, methods = read(file, sets)
    chosen = [dict(zip(swept, values, strict=True)) for values in product(*swept.values())]
    configs = [_with(base, choice) for choice in chosen]
    methods = [method for method in methods if method in list(RECIPES)]
    _refuse_strangers(base, swept, [*dict.fromkeys([*methods, *(each.method.name for each in configs)])])
    notes: dict[str, None] = {}
    checked: dict[str, tuple[Config, int]] = {}
    found: dict[str, Cell] = {}
    names: set[str] = set()
    for choice, whole in zip(chosen, configs, strict=True):
        config, strange = _fitted(whole)
        applied = {key: value for key, value in choice.items() if key not in strange}
        try:
            unseeded = config.model_dump_json(exclude={"run": {"seed"}})
            if unseeded not in checked:  # no mistake depends on the seed
                run = api.start(config, say=lambda note: notes.update({note: None}))
                checked[unseeded] = run.config, run.rounds
            resolved, rounds = checked[unseeded]
            resolved = resolved.replace(run={"seed": config.run.seed})
            identity = resolved.model_dump_json(exclude={"run": {"workers"}})
            if identity in found:
                continue
            name = _name(applied, names)
            found[identity] = Cell(name, out / name, applied, resolved, rounds)
            _refuse_others(found[identity])
        except FeddumapError as error:
            raise FeddumapError(f"cell {_name(applied)}: {error}") from None
    for note in notes:
        say(note)
    return list(found.values())


def _with(base: Config, choice: Mapping[str, Any]) -> Config:
    value = base.model_dump()
    for dotted, each in choice.items():
        section, _, key = dotted.partition(".")
        value.setdefault(section, {})[key] = each
    return Config.parse(value)


def _fitted(config: Config) -> tuple[Config, set[str]]:
    """The configuration without the keys that its method does not have, and those."""
    known = settings_model(config.method.name).model_fields
    method = {key: value for key, value in config.method.settings.items() if key in known}
    strange = {f"method.{key}" for key in config.method.settings if key not in known}
    return Config.parse({**config.model_dump(), "method": {"name": config.method.name, **method}}), strange


def _refuse_strangers(base: Config, swept: Iterable[str], methods: Sequence[str]) -> None:
    """A key of [method] need not suit every method of the grid, but one at least."""
    known = list(dict.fromkeys(key for method in methods for key in settings_model(method).model_fields))
    given = [
        *base.method.settings,
        *(key.removeprefix("method.") for key in swept if key.startswith("method.")),
    ]
    for key in given:
        if key not in known and key != "name":
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean method.{near[0]}? " if near else ""
            raise FeddumapError(
                f"unknown key method.{key}: {hint}Keys of {', '.join(methods)}: {', '.join(known) or 'none'}"
            )


def _refuse_others(cell: Cell) -> None:
    """What is in the cell's directory must be this cell; the number of workers may differ."""
    if not (cell.path / "config.toml").is_file():
        refuse_existing(cell.path, cell.config)
        return
    stored = read_config(cell.path)
    ours = cell.config.replace(run={"workers": stored.run.workers})
    if stored.model_copy(update={"method": resolve(stored.method)}) != ours:
        refuse_existing(cell.path, ours)


def _name(applied: Mapping[str, Any], taken: set[str] | None = None) -> str:
    """A folder's name from the swept values; `taken` names get a number.

    >>> _name({"method.name": "feddu", "run.seed": 7, "method.c": 0.5}), _name({"data.name": "../my set.npz"})
    ('feddu-7-method.c=0.5', 'my_set.npz')
    """
    parts = []
    for key, value in applied.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        parts.append(text if key in PLAIN else f"{key}={text}")
    plain = re.sub(r"[^\w.=+-]+", "_", "-".join(parts))[:LONGEST].strip("._-") or "cell"
    if taken is None:
        return plain
    name, number = plain, 1
    while name.casefold() in taken:
        number += 1
        name = f"{plain}-{number}"
    taken.add(name.casefold())
    return name
