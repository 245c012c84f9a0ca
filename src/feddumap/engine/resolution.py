"""Resolves the configuration of a run: gets its dataset, fills in dependent defaults and checks them."""

from __future__ import annotations

import torch

from feddumap.config import Config
from feddumap.core import clock
from feddumap.core.messages import Architecture
from feddumap.core.object_names import stored_name
from feddumap.data import partition
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split
from feddumap.data.sources import catalog
from feddumap.engine import objects
from feddumap.engine.registry import ENGINES, get_engine
from feddumap.errors import FeddumapError
from feddumap.methods import registry, secure
from feddumap.models import architecture
from feddumap.runs import trackers
from feddumap.screening import privacy
from feddumap.system.callbacks import Say, ignore
from feddumap.training.backends import choose_kernels


def resolve(config: Config, say: Say) -> tuple[Config, Dataset]:
    """Get the dataset, complete the configuration and check both before any training."""
    objects.check(config)
    registry.resolve(config.method)
    secure.check(config)
    if config.data.partition in ("shards", "iid", "dirichlet"):  # others know their devices with the data
        _check_cohort(config)
    if config.run.device != "cpu":
        _check_device(config.run.device)
    trackers.check(config)
    if config.run.engine in ENGINES:
        get_engine(config.run.engine)
    dataset = catalog.get(config.data, say=say, say_cached=ignore)
    completed = complete(config, dataset, say)
    _check_cohort(completed)
    return completed, dataset


def _check_cohort(config: Config) -> None:
    if config.train.cohort > config.data.devices:
        raise FeddumapError(
            f"train.cohort = {config.train.cohort} is larger than data.devices = {config.data.devices}: "
            "lower the one or raise the other"
        )


def complete(config: Config, dataset: Dataset, say: Say = ignore) -> Config:
    """Fill in the defaults that depend on the method, the model, the dataset and this installation."""
    shape = architecture_of(config, dataset)
    labels, users = dataset.train_labels, dataset.train_users
    data = partition.resolve(config.data, len(dataset.classes), labels, users, config.run.seed)
    kernels = choose_kernels(config.train.kernels, shape, config.run.device, say)
    calibration = config.train.calibration
    if calibration is None:
        calibration = registry.compose(config).calibration
    train = config.train.model_copy(update={"kernels": kernels, "calibration": calibration})
    method = registry.resolve(config.method)
    timed = clock.resolve(config.clock, config.model.name)
    config = config.model_copy(update={"method": method, "data": data, "train": train, "clock": timed})
    return _complete_privacy(config, say) if config.privacy.on else config


def _complete_privacy(config: Config, say: Say) -> Config:
    """Fill in δ and the noise, and say what ε the run will have."""
    algorithm = registry.compose(config)
    config = config.model_copy(update={"privacy": privacy.completed(config, algorithm)})
    rounds = algorithm.rounds(config)
    epsilon, target = privacy.spent(config, algorithm, rounds), config.privacy.epsilon
    above = target is not None and epsilon > target
    say(
        f"privacy: ε = {epsilon:.3g} at δ = {config.privacy.delta:.3g} after {rounds} rounds, with a noise "
        f"multiplier of {config.privacy.noise:.4g}"
        + (f"; that is above privacy.epsilon = {target:g}" if above else "")
    )
    return config


def architecture_of(config: Config, dataset: Dataset) -> Architecture:
    """The full-width architecture of a run's network."""
    model = config.model
    return architecture(model.name, len(dataset.classes), dataset.input, model.settings)


def require_family(shape: Architecture, config: Config) -> None:
    """A checkpoint of another network than the configuration's is an error: it may name other code."""
    if stored_name(shape.family) != stored_name(config.model.name):
        raise FeddumapError(
            f"the checkpoint is of the network {shape.family!r}, not of model.name = {config.model.name!r}: "
            "it was altered; restore it, or start a new run"
        )


def _check_device(name: str) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FeddumapError(f"run.device = {name!r} cannot be used here ({reason}): use cpu") from None


def make_split(config: Config, dataset: Dataset, say: Say) -> Split:
    """The partition of a dataset among the devices and the server."""
    labels, data = dataset.train_labels, config.data
    split = partition.split(labels, len(dataset.classes), data, config.run.seed, dataset.train_users)
    wanted, got = partition.requested_server_images(data, len(split.indices)), len(split.server)
    if got < wanted:
        say(
            f"the server holds {got:,} images instead of the {wanted:,} that data.server_fraction = "
            f"{data.server_fraction} asks for: its {data.server_classes} classes have no more"
        )
    return split
