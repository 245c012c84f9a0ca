"""What a folder holds already: nothing, this run, another one, or the rest of an interrupted creation."""

from __future__ import annotations

from pathlib import Path

from feddumap.config import RUNTIME_KEYS, Config
from feddumap.core.object_names import stored_name
from feddumap.errors import FeddumapError
from feddumap.methods import registry
from feddumap.runs import integrity
from feddumap.runs.integrity import FIRST_WEIGHTS, SPLIT
from feddumap.runs.reader import read_config
from feddumap.system.atomic_files import leftovers

FIRST = (SPLIT, FIRST_WEIGHTS)
"""What is written before the configuration."""

NAMES = (
    r"(config\.toml|(command|token)(\.txt)?|privacy\.key|records\.jsonl|(summary|code|census)\.json|"
    r"checkpoint-\d+\.(json|safetensors)|(split|first-weights|frozen-\w+)\.safetensors)"
)
"""The names of the files of a run directory, as a pattern."""


def was_interrupted(path: Path) -> bool:
    """Whether a folder has only what `RunDirectory.create` writes before the configuration: the process was
    killed meanwhile."""
    if not (path / ".lock").is_file():
        return False
    temporary = {left.name for left in leftovers(path, NAMES, locked=True)}
    names = {entry.name for entry in path.iterdir()} - temporary
    return names <= {".lock", *FIRST} and bool(temporary or names != {".lock"})


def require_new(path: Path, config: Config, advice: str = "") -> None:
    """Raise an error if a directory contains a run already, or anything else; `advice` is for a run of
    another configuration."""
    if contains_run(path, config, advice):
        raise FeddumapError(f"{path} holds this run already: continue it with `feddumap resume {path}`")


def contains_run(path: Path, config: Config, advice: str = "") -> bool:
    """Whether a directory contains the run of this configuration; false if it is empty or does not exist, an
    error if it contains anything else, with `advice` if that is a run of another configuration."""
    if path.is_file():
        raise FeddumapError(f"{path} is a file: give --out the name of a folder that does not exist yet")
    if not path.exists() or not any(entry.name != ".lock" for entry in path.iterdir()):
        return False
    if was_interrupted(path):  # `create` writes these files again
        return False
    if not (path / "config.toml").is_file():
        raise FeddumapError(f"{path} exists and is not a run directory: give --out another name")
    advice = advice or _advice(path, config)
    other = read_config(path)
    other = other.model_copy(update={"method": registry.with_defaults(other.method)})
    config = stored(with_runtime_keys(config, other))
    if other == config:
        return True
    key, theirs, ours = integrity.difference(other, config)
    raise FeddumapError(
        f"{path} belongs to another configuration ({key} is {theirs!r} there, {ours!r} here): {advice}"
    )


def _advice(path: Path, config: Config) -> str:
    """What to do if the directory has a run of another configuration."""
    if config.run.engine == "flower":
        return "undo that (only train.rounds may be raised), or make another federation"
    return f"give --out another name, or resume that run with `feddumap resume {path}`"


def stored(config: Config) -> Config:
    """A configuration as run directories hold it: what was passed as an object has the same name in every
    program that passes it."""
    names = {part: stored_name(getattr(config, part).name) for part in ("model", "method")}
    return config.replace(**{part: {"name": name} for part, name in names.items()})


def with_runtime_keys(config: Config, other: Config) -> Config:
    """A copy of `config` with the `RUNTIME_KEYS` and the kernels of `other`, since a run does not change
    kernels."""
    return config.replace(
        run={key: getattr(other.run, key) for key in RUNTIME_KEYS}, train={"kernels": other.train.kernels}
    )
