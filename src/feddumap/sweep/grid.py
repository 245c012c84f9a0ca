"""Grids: many runs described by one file. The cells are the combinations of the swept values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from feddumap import run as api
from feddumap.config import RUNTIME_KEYS, Config, load, read_toml
from feddumap.errors import FeddumapError
from feddumap.methods.registry import RECIPES, settings_model, with_defaults
from feddumap.runs.existing import require_new, with_runtime_keys
from feddumap.runs.reader import read_config
from feddumap.system.callbacks import Say, ignore

UNLABELLED = ("method.name", "model.name", "data.name", "run.seed")  # keys left out of names
LONGEST = 120  # characters of a cell's name

Naming = Callable[[Mapping[str, Any], Config], str]  # (swept values, resolved configuration) -> name


@dataclass(frozen=True)
class Cell:
    """One run of a grid: name, directory, swept values, resolved configuration and rounds."""

    name: str
    path: Path
    swept: Mapping[str, Any]
    config: Config
    rounds: int

    @property
    def kind(self) -> str:
        """Cells of the same kind take about the same time."""
        return f"{self.config.model.name} on {self.config.data.name}"


@dataclass(frozen=True)
class Sweep:
    """One [grid] table: the values of every key it varies, and the methods that the file names for it, before
    --set restricts them."""

    values: Mapping[str, list[Any]]
    methods: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """The common configuration of all cells, the sweeps, and all methods that the file names."""

    base: Config
    sweeps: Sequence[Sweep]
    methods: Sequence[str]


def read(file: Path, sets: Iterable[str] = ()) -> Grid:
    """Read a grid file."""
    return parse(read_toml(file, "grid"), str(file), sets)


def parse(table: Mapping[str, Any], source: str, sets: Iterable[str] = ()) -> Grid:
    """Parse the tables of a grid file, named `source` in errors.

    A --set applies to all cells: where its key is swept, only that value is kept; of several sweeps of the
    key, only those with the value are kept, if there are any.
    """
    base = {section: dict(keys) if isinstance(keys, dict) else keys for section, keys in table.items()}
    swept = _sweeps(source, base.pop("grid", None))
    default = [Config.parse(base).method.name]
    sweeps = [Sweep(values, values.get("method.name", default)) for values in swept]
    methods = [method for sweep in sweeps for method in sweep.methods]
    for section, keys in load(None, sets).model_dump(exclude_unset=True).items():
        for key, value in keys.items():
            sweeps = _restricted(sweeps, f"{section}.{key}", value)
            if any(f"{section}.{key}" not in sweep.values for sweep in sweeps):
                base.setdefault(section, {})[key] = value
    return Grid(Config.parse(base), sweeps, methods)


def _restricted(sweeps: Sequence[Sweep], key: str, value: Any) -> list[Sweep]:
    """The sweeps restricted to one value of a key."""
    listed = any(value in sweep.values.get(key, []) for sweep in sweeps)
    kept = []
    for sweep in sweeps:
        if key not in sweep.values:
            kept.append(sweep)
            continue
        same = [each for each in sweep.values[key] if each == value]
        if same or not listed:
            alone = _all_methods(key, value) or same or [value]
            kept.append(replace(sweep, values={**sweep.values, key: alone}))
    return kept


def _sweeps(source: str, tables: Any) -> list[dict[str, list[Any]]]:
    """The swept values of [grid] or of each [[grid]]."""
    found = tables if isinstance(tables, list) else [tables]
    if not found or not all(isinstance(table, dict) and table for table in found):
        raise FeddumapError(
            f'{source} has no [grid] table: add one with the values to sweep, such as "run.seed" = [1, 2, 3]'
        )
    return [_sweep(table) for table in found]


def _sweep(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    flat: dict[str, Any] = {}
    for key, value in table.items():  # an unquoted dotted key is a nested table
        flat |= (
            {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
        )
    flat = {key: _all_methods(key, value) or value for key, value in flat.items()}
    for key, values in flat.items():
        if "." not in key:
            raise FeddumapError(f"grid key {key!r}: expected section.key, such as train.rounds")
        if not isinstance(values, list) or not values:
            raise FeddumapError(f"grid key {key} = {values!r}: expected a list of values, such as [1, 2]")
    if "run.workers" in flat:
        raise FeddumapError("grid key run.workers changes no result: remove it and use --jobs")
    for key in RUNTIME_KEYS:
        if f"run.{key}" in flat:
            raise FeddumapError(f"grid key run.{key} changes no result: remove it and set it in [run]")
    return flat


def _all_methods(key: str, value: Any) -> list[str] | None:
    """All methods, if the value is "all" and the key method.name."""
    return list(RECIPES) if (key, value) == ("method.name", "all") else None


def name_from_values(applied: Mapping[str, Any], _: Config | None = None) -> str:
    """A folder name from the swept values.

    >>> name_from_values({"method.name": "feddu", "run.seed": 7, "method.c": 0.5})
    'feddu-7-method.c=0.5'
    >>> name_from_values({"data.name": "./a b"})
    'a_b'
    """
    parts = [
        path_component(value) if key in UNLABELLED else f"{key}={path_component(value)}"
        for key, value in applied.items()
    ]
    return "-".join(parts)[:LONGEST].strip("._-") or "cell"


def path_component(value: Any) -> str:
    """A value as part of a folder name."""
    return re.sub(r"[^\w.=+-]+", "_", str(value).lower() if isinstance(value, bool) else str(value))


def cells(file: Path, out: Path, sets: Iterable[str] = (), say: Say = ignore) -> list[Cell]:
    """The cells of a grid file."""
    return cells_of(read(file, sets), out, say)


def cells_of(grid: Grid, out: Path, say: Say = ignore, naming: Naming = name_from_values) -> list[Cell]:
    """The cells in the order of the combinations, validated like runs to train and against existing run
    directories. Combinations that resolve to the same run are one cell."""
    notes: dict[str, None] = {}
    checked: dict[str, tuple[Config, int]] = {}
    found: dict[str, Cell] = {}
    names: set[str] = set()
    for applied, config in combinations(grid):
        try:
            unseeded = config.model_dump_json(exclude={"run": {"seed"}})
            if unseeded not in checked:  # validation does not depend on the seed
                run = api.start(config, say=lambda note: notes.update({note: None}))
                checked[unseeded] = run.config, run.rounds
            resolved, rounds = checked[unseeded]
            resolved = resolved.replace(run={"seed": config.run.seed})
            identity = resolved.model_dump_json(exclude={"run": set(RUNTIME_KEYS)})
            if identity in found:
                continue
            name = _unique(naming(applied, resolved), names)
            found[identity] = Cell(name, out / name, applied, resolved, rounds)
            _check_directory(found[identity])
        except FeddumapError as error:
            raise FeddumapError(f"cell {name_from_values(applied)}: {error}") from None
    for note in notes:
        say(note)
    return list(found.values())


def combinations(grid: Grid) -> list[tuple[dict[str, Any], Config]]:
    """Every distinct combination and its configuration, without [method] keys that its method does not have.

    A swept key must belong to at least one method of its sweep, a common key to at least one of the grid.
    """
    found: dict[str, tuple[dict[str, Any], Config]] = {}
    everywhere = [method for method in grid.methods if method in list(RECIPES)]
    for sweep in grid.sweeps:
        chosen = [dict(zip(sweep.values, each, strict=True)) for each in product(*sweep.values.values())]
        configs = [_with(grid.base, choice) for choice in chosen]
        named = [method for method in sweep.methods if method in list(RECIPES)]
        methods = list(dict.fromkeys([*named, *(config.method.name for config in configs)]))
        everywhere += methods
        _check_method_keys([key[7:] for key in sweep.values if key.startswith("method.")], methods)
        for choice, whole in zip(chosen, configs, strict=True):
            config, unsupported = _without_unsupported_keys(whole)
            applied = {key: value for key, value in choice.items() if key not in unsupported}
            found.setdefault(config.model_dump_json(), (applied, config))
    _check_method_keys(grid.base.method.settings, list(dict.fromkeys(everywhere)))
    return list(found.values())


def _with(base: Config, choice: Mapping[str, Any]) -> Config:
    value = base.model_dump(exclude_unset=True)  # whether a key was given matters to some defaults
    for dotted, each in choice.items():
        section, _, key = dotted.partition(".")
        value.setdefault(section, {})[key] = each
    return Config.parse(value)


def _without_unsupported_keys(config: Config) -> tuple[Config, set[str]]:
    """The configuration without [method] keys that its method does not have, and those keys."""
    known = settings_model(config.method.name).model_fields
    method = {key: value for key, value in config.method.settings.items() if key in known}
    unsupported = {f"method.{key}" for key in config.method.settings if key not in known}
    return Config.parse(
        {**config.model_dump(exclude_unset=True), "method": {"name": config.method.name, **method}}
    ), unsupported


def _check_method_keys(given: Iterable[str], methods: Sequence[str]) -> None:
    """Raise an error for a [method] key that none of the methods has."""
    known = list(dict.fromkeys(key for method in methods for key in settings_model(method).model_fields))
    for key in given:
        if key not in known and key != "name":
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean method.{near[0]}? " if near else ""
            raise FeddumapError(
                f"unknown key method.{key}: {hint}Keys of {', '.join(methods)}: {', '.join(known) or 'none'}"
            )


def _check_directory(cell: Cell) -> None:
    """Raise an error if the cell's directory holds another run; keys that change no result may differ."""
    if not (cell.path / "config.toml").is_file():
        require_new(cell.path, cell.config)
        return
    stored = read_config(cell.path)
    ours = with_runtime_keys(cell.config, stored)
    if stored.model_copy(update={"method": with_defaults(stored.method)}) != ours:
        advice = "give --out another name for the grid, or undo that"
        if stored.train.rounds < ours.train.rounds:
            advice += (
                f"; to add rounds, run `feddumap resume CELL --rounds {ours.train.rounds}` for each cell"
            )
        require_new(cell.path, ours, advice)


def _unique(plain: str, taken: set[str]) -> str:
    """The name, with a number appended if it is in `taken`; it is added to `taken`."""
    name, number = plain, 1
    while name.casefold() in taken:
        number += 1
        name = f"{plain}-{number}"
    taken.add(name.casefold())
    return name
