"""Run names of all items, which share one folder: a function of the configuration alone.

A run that several items share has one name, so it is trained once; runs with different results have different
names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from feddumap import run as api
from feddumap.config import RUNTIME_KEYS, Config, read_toml
from feddumap.data.dataset import Dataset
from feddumap.data.sources import catalog
from feddumap.paper.item import HERE, Item
from feddumap.sweep.grid import LONGEST, Cell, cells_of, path_component
from feddumap.system.callbacks import Say, ignore

LEADING = ("data.name", "model.name", "method.name")
APART = (
    *LEADING,
    "run.seed",
    *(f"run.{key}" for key in RUNTIME_KEYS),
)  # placed first, placed last, and without effect


def cells(
    item: Item,
    out: Path,
    seeds: list[int],
    sets: Iterable[str] = (),
    say: Say = ignore,
) -> list[Cell]:
    """The runs of an item in the shared folder."""
    return cells_of(item.grid(seeds, sets), out, say, name_from_configuration)


def name_from_configuration(_: Mapping[str, Any], config: Config) -> str:
    """DATA-MODEL-METHOD, the keys that differ from the paper's setting, and the seed. A checksum is added if
    the name is truncated or has replaced characters."""
    own = flat(config)
    plain = flat(_paper_setting(*(own[key] for key in LEADING)))
    parts = [own[key] for key in LEADING]
    parts += [f"{key}={_text(own[key])}" for key in own if key not in APART and own[key] != plain.get(key)]
    exact = "-".join(parts)
    name = "-".join(map(path_component, parts))[:LONGEST].strip("._-")
    if name != exact:
        name += f"-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"
    return f"{name}-{config.run.seed}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _paper_setting(data: str, model: str, method: str) -> Config:
    """The paper's setting with this data, model and method, resolved."""
    setting = read_toml(HERE / "setting.toml", "setting")
    del setting["notes"]
    setting["data"]["name"] = data
    config = Config.parse({**setting, "model": {"name": model}, "method": {"name": method}})
    return api.complete(config, _dataset(data))


@cache
def _dataset(name: str) -> Dataset:
    return catalog.get(name)


def flat(config: Config) -> dict[str, Any]:
    """All values by section.key."""
    dumped = config.model_dump()
    return {f"{section}.{key}": value for section, keys in dumped.items() for key, value in keys.items()}
