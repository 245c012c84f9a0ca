"""The partition of the training samples: which belong to each device, and the server's share.

With the natural partition, devices are the users of the data set, and the server's samples are drawn from
those that are nobody's (`natural.py`). With every other, the first 80 % of the training samples, in the data
set's order, belong to the devices, and the server's are drawn from the last 20 %. Server and devices never
share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feddumap.config import DataConfig
from feddumap.core.rng import stream
from feddumap.data import flwr_partitioners, natural
from feddumap.data.dirichlet import Ints, dirichlet, ranges
from feddumap.errors import FeddumapError


@dataclass(frozen=True, eq=False)
class Split:
    """Indices into the training set: device k holds `indices[offsets[k]:offsets[k + 1]]`.

    >>> made = Split(np.array([4, 2, 0]), np.array([0, 2, 3]), np.array([1]))
    >>> made.devices, made.device(0), made.sizes, made.counts(np.array([0, 1, 1, 1, 0]), 2)
    (2, array([4, 2]), array([2, 1]), array([[1, 1],
           [1, 0]]))
    """

    indices: Ints
    offsets: Ints
    server: Ints

    @property
    def devices(self) -> int:
        """N, the number of devices."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """n_k, the number of images of each device."""
        return np.diff(self.offsets)

    def device(self, k: int) -> Ints:
        """Indices of the images of device k."""
        if not 0 <= k < self.devices:
            raise IndexError(f"device {k}: expected 0 to {self.devices - 1}")
        return self.indices[self.offsets[k] : self.offsets[k + 1]]

    def counts(self, labels: npt.NDArray[np.integer], classes: int) -> Ints:
        """Number of images of each class on each device, [N, C]."""
        owner = np.repeat(np.arange(self.devices), self.sizes)
        cell = owner * classes + _check_labels(labels, classes)[self.indices]
        return np.bincount(cell, minlength=self.devices * classes).reshape(self.devices, classes)

    def to_arrays(self) -> dict[str, Ints]:
        """The arrays to save; `from_arrays` reads them back."""
        return {"indices": self.indices, "offsets": self.offsets, "server": self.server}

    @staticmethod
    def from_arrays(arrays: Mapping[str, npt.NDArray[np.int64]], samples: int) -> Split:
        """A saved split of a training set of `samples` images, fully validated."""
        names = ("indices", "offsets", "server")
        if set(arrays) != set(names):
            raise _damaged(f"it has the arrays {sorted(arrays)}, expected {', '.join(names)}")
        for name in names:
            if arrays[name].dtype != np.int64 or arrays[name].ndim != 1:
                raise _damaged(f"{name} is {arrays[name].ndim}-d {arrays[name].dtype}, expected 1-d int64")
        made = Split(*(arrays[name] for name in names))
        ends = made.offsets[[0, -1]].tolist() if made.devices > 0 else None
        if ends != [0, len(made.indices)] or (made.sizes < 1).any():
            raise _damaged(f"offsets do not rise from 0 to {len(made.indices)}, the number of device images")
        used = np.concatenate([made.indices, made.server])
        if used.min() < 0 or used.max() >= samples:
            raise _damaged(f"indices span {used.min()} to {used.max()}, expected 0 to {samples - 1}")
        if (times := np.bincount(used)).max() > 1:
            raise _damaged(f"image {times.argmax()} is held {times.max()} times, expected once")
        return made


def _damaged(reason: str) -> FeddumapError:
    return FeddumapError(f"the saved split is invalid: {reason}; recreate it from its configuration")


def resolve(
    config: DataConfig,
    classes: int,
    labels: npt.NDArray[np.integer] | None = None,
    users: Ints | None = None,
    seed: int = 0,
) -> DataConfig:
    """The section with its defaults filled in: max(2, C // 5) shards per device, C // 2 server classes and,
    with `labels` and `users`, the number of devices that a partition by users or by flwr-datasets has.

    >>> made = resolve(DataConfig(), 100)
    >>> made.shards_per_device, made.server_classes
    (20, 50)
    """
    if config.partition not in ("iid", "dirichlet") and config.size_spread > 0:
        equal = ", which makes devices of equal size" if config.partition == "shards" else ""
        raise FeddumapError(
            f"data.size_spread = {config.size_spread}: expected 0 with data.partition = {config.partition!r}"
            f"{equal}; use iid or dirichlet"
        )
    if config.partitioner is not None and not config.partition.startswith(flwr_partitioners.PREFIX):
        raise FeddumapError(
            f"[data.partitioner]: expected none with data.partition = {config.partition!r}; use flwr:CLASS"
        )
    server_classes = config.server_classes or max(1, classes // 2)
    if server_classes > classes:
        raise FeddumapError(
            f"data.server_classes = {server_classes}: expected at most {classes}, the number of "
            "classes of the data set; lower it"
        )
    shards = config.shards_per_device or max(2, classes // 5)
    devices = config.devices
    if labels is not None and config.partition == "natural":
        devices = natural.device_count(config, users)
    elif labels is not None and config.partition.startswith(flwr_partitioners.PREFIX):
        held = slice(0, len(labels) * 4 // 5)
        owners = None if users is None else users[held]
        devices = flwr_partitioners.device_count(labels[held].astype(np.int64), owners, config, seed)
    return config.model_copy(
        update={"shards_per_device": shards, "server_classes": server_classes, "devices": devices}
    )


def split(
    labels: npt.NDArray[np.integer], classes: int, config: DataConfig, seed: int, users: Ints | None = None
) -> Split:
    """Assign the training samples to devices and server, deterministically; `users` say whose each is.

    The server's samples and the devices' do not depend on each other's settings.
    """
    config = resolve(config, classes, labels, users, seed)
    labels = _check_labels(labels, classes)
    if config.partition == "natural":
        found = natural.natural(users, config, seed)
        offsets = np.concatenate([[0], np.cumsum(found.sizes)])
        server = _server(labels, classes, found.pool, len(found.indices), config, seed)
        return Split(found.indices, offsets, server)
    cut = len(labels) * 4 // 5
    if config.devices > cut:
        raise FeddumapError(
            f"data.devices = {config.devices}: expected at most {cut}, the number of device images, as "
            "each device needs one; lower it or use a larger data set"
        )
    if config.partition == "shards":
        indices, sizes = _shards(labels[:cut], config, seed)
    elif config.partition.startswith(flwr_partitioners.PREFIX):
        owners = None if users is None else users[:cut]
        parts = flwr_partitioners.partition(labels[:cut], owners, config, seed)
        indices, sizes = np.concatenate(parts), np.array([len(part) for part in parts])
    else:
        sizes = _sizes(cut, config.devices, config.size_spread, seed)
        indices = stream(seed, "partition", "order").permutation(cut)
        if config.partition == "dirichlet":
            indices = dirichlet(labels, classes, indices, sizes, config.alpha, seed)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    pool = np.arange(cut, len(labels))
    return Split(indices, offsets, _server(labels, classes, pool, len(indices), config, seed))


def _shards(pool: Ints, config: DataConfig, seed: int) -> tuple[Ints, Ints]:
    """Sort the pool by label, split it into shards of nearly equal size, and deal them in random order."""
    assert config.shards_per_device is not None
    number = config.devices * config.shards_per_device
    if number > len(pool):
        raise FeddumapError(
            f"data.shards_per_device = {config.shards_per_device}: expected at most "
            f"{len(pool) // config.devices}, as {config.devices} devices share {len(pool)} images; "
            "lower it or data.devices"
        )
    lengths = _even_sizes(len(pool), number)
    starts = np.cumsum(lengths) - lengths
    dealt = stream(seed, "partition", "shards").permutation(number)
    indices = np.argsort(pool, kind="stable")[ranges(starts[dealt], lengths[dealt])]
    return indices, lengths[dealt].reshape(config.devices, -1).sum(axis=1)


def _sizes(total: int, devices: int, spread: float, seed: int) -> Ints:
    """n_k ∝ LogNormal(0, σ), rounded by largest remainder to the sum `total`, none below 1.

    Devices whose share is below one image get one and the others share the rest; this repeats because it
    lowers the others' shares.
    """
    if spread == 0:
        return _even_sizes(total, devices)
    weight = stream(seed, "partition", "sizes").lognormal(0.0, spread, devices)
    small = np.zeros(devices, dtype=bool)
    while True:
        ideal = np.where(small, 1.0, weight * (total - small.sum()) / weight[~small].sum())
        below = ~small & (ideal < 1 - 1e-9)  # with a tolerance for rounding
        if not below.any():
            break
        small |= below
    sizes = np.maximum(ideal.astype(np.int64), 1)
    largest = np.argsort(sizes - ideal, kind="stable")
    sizes[largest[: total - sizes.sum()]] += 1
    return sizes


def _server(labels: Ints, classes: int, pool: Ints, held: int, config: DataConfig, seed: int) -> Ints:
    """n₀ = round(p · n) in equal parts of `server_classes` classes, from the samples `pool`; the devices hold
    n = `held` samples.

    Classes and images are prefixes of random permutations: with the same seed, a smaller p gives a subset of
    the images of a larger one, and fewer classes a subset of more. The i-th class holds ⌈(n₀ − i) / k⌉
    images; if some class has fewer, no class holds more than that (`requested_server_images` is the number
    requested).
    """
    assert config.server_classes is not None
    wanted = requested_server_images(config, held)
    if config.server_fraction > 0 and wanted == 0:
        raise FeddumapError(
            f"data.server_fraction = {config.server_fraction}: gives no image of {held} device images; "
            f"expected 0 or more than {0.5 / held:.2g}"
        )
    if wanted > len(pool):
        raise FeddumapError(
            f"data.server_fraction = {config.server_fraction}: expected at most {len(pool) / held:g}, "
            f"as the server's images are drawn from {_pool_name(config)}; lower it"
        )
    rng = stream(seed, "server-data")
    k = config.server_classes
    kinds = rng.permutation(classes)[:k]
    orders = [rng.permutation(pool[labels[pool] == kind]) for kind in kinds]
    fewest, kind = min((len(order), int(kind)) for order, kind in zip(orders, kinds, strict=True))
    if wanted and not fewest:
        raise FeddumapError(
            f"data.server_classes = {k}: class {kind} has no image among {_pool_name(config)}, which the "
            "server's are drawn from; lower it, or shuffle a data set sorted by label"
        )
    parts = [order[: min(size, fewest)] for order, size in zip(orders, _even_sizes(wanted, k), strict=True)]
    return np.sort(np.concatenate(parts))


def _pool_name(config: DataConfig) -> str:
    natural_pool = "the samples without a user, or a fifth of every user's"
    return natural_pool if config.partition == "natural" else "the last 20 % of the training images"


def validation(
    labels: npt.NDArray[np.integer],
    classes: int,
    config: DataConfig,
    made: Split,
    seed: int,
    users: Ints | None = None,
) -> Ints:
    """`data.validation` images in equal parts of the server's classes, from the images that the server's are
    drawn from and that it does not train on. They depend only on the seed and the server's images."""
    if not config.validation:
        return np.zeros(0, dtype=np.int64)
    labels = _check_labels(labels, classes)
    if config.partition == "natural":
        pool = natural.natural(users, config, seed).pool
    else:
        pool = np.arange(len(labels) * 4 // 5, len(labels))
    free = np.setdiff1d(pool, made.server)
    kinds = np.unique(labels[made.server])
    if not len(kinds):
        raise FeddumapError(
            f"data.validation = {config.validation}: expected 0, as the server has no images; raise "
            "data.server_fraction"
        )
    rng = stream(seed, "validation")
    parts = []
    for kind, size in zip(kinds, _even_sizes(config.validation, len(kinds)), strict=True):
        own = free[labels[free] == kind]
        if len(own) < size:
            raise FeddumapError(
                f"data.validation = {config.validation}: expected at most {len(own) * len(kinds)}, as class "
                f"{kind} has {len(own)} images left that the server does not train on; lower it"
            )
        parts.append(rng.permutation(own)[:size])
    return np.sort(np.concatenate(parts))


def requested_server_images(config: DataConfig, held: int) -> int:
    """round(p · n), the server images that `server_fraction` requests if the devices hold n = `held`."""
    return round(config.server_fraction * held)


def devices_of_tests(made: Split, train_users: Ints | None, test_users: Ints | None) -> Ints | None:
    """The device that each test sample belongs to, −1 for none; None if the data set does not say.

    A device is the user of its samples.

    >>> made = Split(np.array([1, 2, 0]), np.array([0, 2, 3]), np.array([], int))
    >>> devices_of_tests(made, np.array([7, 3, 3]), np.array([7, 3, -1, 5, 7]))
    array([ 1,  0, -1, -1,  1])
    """
    if train_users is None or test_users is None:
        return None
    users = train_users[made.indices[made.offsets[:-1]]]
    device = np.full(max(int(train_users.max()), int(test_users.max())) + 2, -1)
    device[users] = np.arange(len(users))
    device[-1] = -1  # nobody's
    return device[test_users]


def _even_sizes(total: int, parts: int) -> Ints:
    """Sizes of `parts` parts of `total` that differ by at most one, larger first, as in np.array_split."""
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def _check_labels(labels: npt.NDArray[np.integer], classes: int) -> Ints:
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not labels.size:
        raise FeddumapError(
            f"labels are {labels.dtype} of shape {labels.shape}: expected a vector of integers"
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise FeddumapError(
            f"labels reach from {labels.min()} to {labels.max()}: expected 0 to {classes - 1} with {classes} "
            "classes"
        )
    return labels.astype(np.int64)
