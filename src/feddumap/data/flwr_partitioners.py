"""Partitioners of flwr-datasets, by the name of their class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from feddumap.config import DataConfig
from feddumap.data.dirichlet import Ints
from feddumap.errors import FeddumapError, unknown

PREFIX = "flwr:"


def partition(labels: Ints, users: Ints | None, config: DataConfig, seed: int) -> list[Ints]:
    """The indices that each partition gets of `labels`, in a table with the columns `label` and, if the data
    set says whose each sample is, `user` (a number, empty for nobody).

    Where the partitioner takes them and [data.partitioner] does not give them, `num_partitions` is
    data.devices, `seed` the run's, and `partition_by` the label, or the user if it is one by identifiers.
    """
    made = _make(config, seed)
    library = import_module("datasets")
    columns: dict[str, Any] = {"label": labels, "index": np.arange(len(labels))}
    if users is not None:
        columns["user"] = [str(user) if user >= 0 else "" for user in users.tolist()]
    try:
        made.dataset = library.Dataset.from_dict(columns)
        count = made.num_partitions
        parts = [
            np.array(made.load_partition(number)["index"], np.int64).reshape(-1) for number in range(count)
        ]
    except Exception as error:  # the library's own checks of its arguments
        raise _failed(config, error) from None
    empty = next((number for number, part in enumerate(parts) if not len(part)), None)
    if empty is not None:
        raise FeddumapError(
            f"data.partition = {config.partition!r}: device {empty} of {count} gets no sample; lower "
            "data.devices or change [data.partitioner]"
        )
    if len(np.unique(np.concatenate(parts))) < sum(map(len, parts)):
        raise FeddumapError(
            f"data.partition = {config.partition!r}: gives some sample to several devices; use a partitioner "
            "that divides the samples"
        )
    return parts


def device_count(labels: Ints, users: Ints | None, config: DataConfig, seed: int) -> int:
    """The number of partitions: data.devices where the partitioner takes it, else what it makes."""
    given = (config.partitioner or {}).get("num_partitions")
    count = given or (
        config.devices
        if "num_partitions" in _parameters(_class(config))
        else len(partition(labels, users, config, seed))
    )
    if "devices" in config.model_fields_set and count != config.devices:
        raise FeddumapError(
            f"data.devices = {config.devices}: {config.partition} makes {count} partitions; leave it out"
        )
    return int(count)


def _class(config: DataConfig) -> type[Any]:
    try:
        module = import_module("flwr_datasets.partitioner")
    except ImportError:
        raise FeddumapError(
            f"data.partition = {config.partition!r} needs the package flwr-datasets, which is not installed: "
            "pip install 'feddumap[flwr-datasets]'"
        ) from None
    name = config.partition.removeprefix(PREFIX)
    known = {
        each: value
        for each, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, module.Partitioner)
        and value is not module.Partitioner
    }
    if name not in known:
        raise unknown("partitioner of flwr-datasets", name, known)
    return known[name]


def _parameters(kind: type[Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.__init__).parameters


def _make(config: DataConfig, seed: int) -> Any:
    kind = _class(config)
    taken = _parameters(kind)
    by = "user" if "NaturalId" in kind.__name__ else "label"
    defaults = {"num_partitions": config.devices, "seed": seed % 2**32, "partition_by": by}
    settings = {key: value for key, value in defaults.items() if key in taken} | (config.partitioner or {})
    try:
        return kind(**settings)
    except Exception as error:  # wrong arguments
        raise _failed(config, error) from None


def _failed(config: DataConfig, error: Exception) -> FeddumapError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return FeddumapError(
        f"data.partition = {config.partition!r} cannot be made ({reason}): change [data.partitioner]"
    )
