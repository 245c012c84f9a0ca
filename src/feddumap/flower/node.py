"""A device behind a Flower node: its identity, its data, and its state between messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from feddumap.config import Config, DataConfig
from feddumap.core.messages import Architecture, InputSpec, Tensors
from feddumap.data import partition
from feddumap.data.cache import home
from feddumap.data.sources import catalog, device_files
from feddumap.data.sources.code import is_code
from feddumap.device.holdings import Holdings, SplitHoldings
from feddumap.device.state import load, save
from feddumap.errors import FeddumapError, printable
from feddumap.flower.requests import Request
from feddumap.models.factories import LIBRARIES
from feddumap.models.frozen import is_known, with_constants
from feddumap.system.atomic_files import write_text
from feddumap.training.samples import Samples

LOGGER = logging.getLogger("flwr")  # Flower's own
SHARED = "gift.safetensors"
FROZEN = "frozen-{}.safetensors"
REFUSAL = "refusal.txt"


@dataclass(frozen=True)
class Node:
    """The settings of a node, from its --node-config.

    `data` is the path of the device's own data; without it the device holds its part of the data set that the
    server names, as in a simulation. `modules` says whether a server may name code on this machine
    (`module:function`) to run.
    """

    device: int
    data: Path | None
    state: Path
    modules: bool

    @staticmethod
    def read(config: Mapping[str, object], state: Path | None = None, allow: bool = False) -> Node:
        """From Flower's node configuration; `state` is the default folder for the device's state, `allow` the
        default of allow-modules."""
        device, modules = config.get("partition-id"), config.get("allow-modules", allow)
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
        """The folder of the device's state of a run."""
        return self.state / token / f"{self.device:06d}"

    def has_shared(self, token: str) -> bool:
        return (self.folder(token) / SHARED).exists()

    def frozen(self, token: str) -> str:
        """The hash of the frozen tensors that the device has; empty if it has none."""
        found = sorted(self.folder(token).glob(FROZEN.format("*")))
        return found[-1].stem.removeprefix("frozen-") if found else ""

    def permit(self, config: Config, family: str) -> None:
        """Refuse a request that would run code which the node's owner has not allowed."""
        data = config.data.name if self.data is None and is_code(config.data.name) else ""
        for key, name in (("method.name", config.method.name), ("model.name", family), ("data.name", data)):
            library = key == "model.name" and name.partition(":")[0] in LIBRARIES
            if ":" in name and not library and not self.modules:
                raise FeddumapError(
                    f"{key} = {name!r} names code to run on this device, which its owner has not allowed: "
                    "start the node with allow-modules=true in its --node-config, or use a known name"
                )
        if family != config.model.name:
            raise FeddumapError(f"the architecture is a {family!r}, not model.name = {config.model.name!r}")


def log_refusal(node: Node | None, token: str | None, reason: str) -> None:
    """Log why this device refuses a request, or is refused; not again if it is what was last logged for the
    run. Every message is handled by another process, so that is in a file."""
    said = printable(reason)
    path = node.folder(token) / REFUSAL if node is not None and token is not None else None
    if path is not None:
        try:
            if path.exists() and path.read_bytes() == said.encode():
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, said)
        except OSError as error:  # then it is logged every time
            LOGGER.warning("feddumap: cannot write %s: %s", path, error.strerror)
    LOGGER.warning("feddumap, %s: %s", f"device {node.device}" if node is not None else "this node", said)


def forget_refusal(node: Node, token: str) -> None:
    """Note that the device does what it is asked to."""
    (node.folder(token) / REFUSAL).unlink(missing_ok=True)


def save_shared(node: Node, token: str, shared: Samples) -> None:
    """Store the images that the server shares."""
    save(node.folder(token) / SHARED, {"inputs": shared.inputs, "labels": shared.targets})


def keep_frozen(node: Node, token: str, shape: Architecture, sent: Tensors | None) -> None:
    """Make the frozen tensors of a network known to this process: those that the message brought, which are
    stored, or those stored before."""
    folder = node.folder(token)
    path = folder / FROZEN.format(shape.frozen)
    if sent is not None:
        save(path, sent)
        for other in folder.glob(FROZEN.format("*")):
            if other != path:
                other.unlink(missing_ok=True)
    if is_known(shape):
        return
    try:
        found = sent if sent is not None else load(path, "the network's frozen tensors")
        if with_constants(shape, found) != shape:
            raise FeddumapError(f"{path} has other tensors than the network's frozen ones")
    except FeddumapError:
        path.unlink(missing_ok=True)  # they are then sent again
        raise


def holdings_of(node: Node, request: Request) -> Holdings:
    """The data that the device trains on: its own, or its part of the data set."""
    config = request.config
    if node.data is not None:
        columns = json.dumps([config.data.input, config.data.label])
        inputs, labels = _own(node.data, request.classes, request.architecture.input, columns)
        return OwnHoldings(inputs, labels, node, request.token)
    if node.device >= config.data.devices:
        raise FeddumapError(
            f"this node is device {node.device}, but data.devices = {config.data.devices}: give it a "
            "partition-id below that"
        )
    return _split(config.data.model_dump_json(), config.run.seed)


@dataclass(frozen=True, eq=False)
class OwnHoldings:
    """A device's own data. Images that the server shares arrive by message, and are stored with its state."""

    inputs: np.ndarray
    numbers: np.ndarray
    node: Node
    token: str

    def labels(self, device: int) -> np.ndarray:
        return self.numbers

    def samples(self, device: int) -> Samples:
        return Samples(torch.from_numpy(self.inputs), torch.from_numpy(self.numbers))

    def shared(self, device: int, limit: int) -> Samples:
        if not self.node.has_shared(self.token):
            raise FeddumapError(
                "the images that the server shares are missing on this device: they must be sent again"
            )
        tensors = load(self.node.folder(self.token) / SHARED, "the images that the server shares")
        return Samples(tensors["inputs"][:limit], tensors["labels"][:limit])


def _log(message: str) -> None:
    LOGGER.info(printable(message))


@lru_cache(maxsize=4)
def _own(
    path: Path, classes: tuple[str, ...], given: InputSpec, columns: str
) -> tuple[np.ndarray, np.ndarray]:
    names = dict(zip(("input", "label"), json.loads(columns), strict=True))
    return device_files.read(path, classes, given, _log, DataConfig(**names))


@lru_cache(maxsize=4)
def _split(section: str, seed: int) -> SplitHoldings:
    """The split of the data set, the same as in a simulation; `section` is [data] as JSON."""
    data = DataConfig.model_validate_json(section)
    dataset = catalog.get(data, say=_log)
    made = partition.split(dataset.train_labels, len(dataset.classes), data, seed, dataset.train_users)
    return SplitHoldings(dataset, made, seed)
