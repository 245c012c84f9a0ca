"""Data sets of the Hugging Face library `datasets`, from its hub or from a local folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from feddumap.config import DataConfig
from feddumap.data.dataset import Contents
from feddumap.data.sources import tables
from feddumap.data.sources.rows import Rows, contents
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Say

PREFIX = "hub:"
SAVED = ("dataset_dict.json", "state.json")  # of `save_to_disk`


def local(name: str) -> Path | None:
    """The folder that `hub:PATH` names, if it is one."""
    path = Path(name.removeprefix(PREFIX)).expanduser()
    return path if path.is_dir() else None


def from_hub(name: str, data: DataConfig, say: Say) -> Contents:
    """The data set `hub:NAME` or `hub:PATH`: its split `train`, and `test` if it has one."""
    splits = _splits(name)
    if "train" not in splits:
        raise FeddumapError(f"{name} has the splits {', '.join(splits)}: expected train")
    if data.test is not None:
        raise FeddumapError(f"data.test = {data.test!r}: {name} has splits; expected none, remove it")
    train = _rows(splits["train"], f"{name}, split train", data, say)
    test = None
    if "test" in splits:
        if data.test_fraction is not None:
            raise FeddumapError(
                f"data.test_fraction = {data.test_fraction}: {name} has a split test; remove the key"
            )
        test = _rows(splits["test"], f"{name}, split test", data, say, tables.colour_channels(train.stored))
    return contents(train, test, data, f"the Hugging Face data set {name.removeprefix(PREFIX)}")


def _rows(split: Any, origin: str, data: DataConfig, say: Say, channels: int | None = None) -> Rows:
    names = tables.needed(split.column_names, data, origin)
    label = split.features[data.label or tables.LABEL]
    classes = tuple(label.names) if type(label).__name__ == "ClassLabel" else None
    table = split.select_columns(names).with_format("arrow")[:]
    return tables.rows(table, data, origin, say, classes, channels)


def _splits(name: str) -> dict[str, Any]:
    library = require()
    folder = local(name)
    try:
        if folder is not None and any((folder / file).exists() for file in SAVED):
            found = library.load_from_disk(str(folder))
        else:
            found = library.load_dataset(str(folder or name.removeprefix(PREFIX)))
    except Exception as error:  # the library's own, pyarrow's, and those of the network
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise FeddumapError(f"the data set {name} cannot be loaded ({reason}): check its name") from None
    return dict(found) if isinstance(found, dict) else {"train": found}


def require() -> Any:
    """The library, or an error that says how to install it."""
    try:
        return import_module("datasets")
    except ImportError:
        raise FeddumapError(
            "hub: needs the package datasets, which is not installed: pip install 'feddumap[hub]'"
        ) from None
