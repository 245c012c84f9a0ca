"""A device behind a Flower node: who it is, what it holds, and what it keeps between messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from feddumap.config import Config, DataConfig
from feddumap.data import partition
from feddumap.data.dataset import home
from feddumap.data.sources import catalog, device_files
from feddumap.device.holdings import Holdings, SplitHoldings
from feddumap.device.state import load, save
from feddumap.errors import FeddumapError
from feddumap.flower.requests import Order
from feddumap.training.samples import Samples

LOGGER = logging.getLogger("flwr")  # Flower's own
GIFT = "gift.safetensors"


@dataclass(frozen=True)
class Node:
    """What the owner of a node decided, by its --node-config.

    `data` is where the device's own data is; without it the device holds its part of the data set that the
    server names, as in a simulation. `modules` says whether a server may name code of this machine's
    (`module:function`) to be run.
    """

    device: int
    data: Path | None
    state: Path
    modules: bool

    @staticmethod
    def read(config: Mapping[str, object], state: Path | None = None) -> Node:
        """From Flower's node configuration; `state` is where the device keeps things if that does not say."""
        device, modules = config.get("partition-id"), config.get("allow-modules", False)
        if type(device) is not int or device < 0:
            raise FeddumapError(
                f"this node's partition-id is {device!r}: expected the device's number, such as "
                "--node-config 'partition-id=0'"
            )
        if not isinstance(modules, bool):
            raise FeddumapError(f"this node's allow-modules is {modules!r}: expected true or false")
        data, folder = config.get("data"), config.get("state")
        where = Path(str(folder)).expanduser() if folder is not None else state or home() / "flower"
        return Node(device, Path(str(data)).expanduser() if data is not None else None, where, modules)

    def folder(self, token: str) -> Path:
        """Where the device keeps what it needs of a run."""
        return self.state / token / f"{self.device:06d}"

    def has_gift(self, token: str) -> bool:
        return (self.folder(token) / GIFT).exists()

    def permit(self, config: Config, family: str) -> None:
        """What a server sends does not make a device run code that its owner did not allow."""
        for key, name in (("method.name", config.method.name), ("model.name", family)):
            if ":" in name and not self.modules:
                raise FeddumapError(
                    f"{key} = {name!r} names code to be run on this device, which its owner has not allowed: "
                    "start the node with allow-modules=true in its --node-config, or use a known name"
                )
        if family != config.model.name:
            raise FeddumapError(f"the architecture is a {family!r}, not model.name = {config.model.name!r}")


def accept_gift(node: Node, token: str, gift: Samples) -> None:
    """Keep the images that the server shares."""
    save(node.folder(token) / GIFT, {"images": gift.images, "labels": gift.labels})


def holdings_of(node: Node, order: Order) -> Holdings:
    """What the device trains on: its own data, or its part of the data set."""
    config = order.config
    if node.data is not None:
        images, labels = _own(node.data, order.classes)
        return OwnHoldings(images, labels, node, order.token)
    if node.device >= config.data.devices:
        raise FeddumapError(
            f"this node is device {node.device}, but data.devices = {config.data.devices}: give it a "
            "partition-id below that"
        )
    return _split(config.data, config.run.seed)


@dataclass(frozen=True, eq=False)
class OwnHoldings:
    """A device's own data. What the server shares comes by message and lies beside the device's memory."""

    images: np.ndarray
    numbers: np.ndarray
    node: Node
    token: str

    def labels(self, device: int) -> np.ndarray:
        return self.numbers

    def samples(self, device: int) -> Samples:
        return Samples(torch.from_numpy(self.images), torch.from_numpy(self.numbers))

    def shared(self, device: int, limit: int) -> Samples:
        if not self.node.has_gift(self.token):
            raise FeddumapError("the images that the server shares are not here: they must be sent again")
        tensors = load(self.node.folder(self.token) / GIFT, "the images that the server shares")
        return Samples(tensors["images"][:limit], tensors["labels"][:limit])


@lru_cache(maxsize=4)
def _own(path: Path, classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    return device_files.read(path, classes, LOGGER.info)


@lru_cache(maxsize=4)
def _split(data: DataConfig, seed: int) -> SplitHoldings:
    """The simulation's own split, made here again."""
    dataset = catalog.get(data.name, say=LOGGER.info)
    made = partition.split(dataset.train_labels, len(dataset.classes), data, seed)
    return SplitHoldings(dataset, made, seed)
