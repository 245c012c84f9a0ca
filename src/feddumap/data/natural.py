"""The natural partition: the users of a data set are the devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddumap.config import DataConfig
from feddumap.core.rng import stream
from feddumap.data.dirichlet import Ints
from feddumap.errors import FeddumapError

POOL_SHARE = 5  # one of so many samples of every user, if no sample is nobody's


@dataclass(frozen=True, eq=False)
class NaturalParts:
    """Device k holds the next `sizes[k]` of `indices`; `pool` is what the server's samples are drawn from."""

    indices: Ints
    sizes: Ints
    pool: Ints


def users_of(train_users: Ints | None) -> Ints:
    """The users with training samples, in ascending order."""
    if train_users is None:
        raise FeddumapError(
            "data.partition = 'natural': the data set does not say whose each sample is; name a column in "
            "data.user (tables, hub), add the array train_users (.npz), or use another partition"
        )
    found = np.unique(train_users)
    found = found[found >= 0]
    if not len(found):
        raise FeddumapError(
            "data.partition = 'natural': no training sample has a user; use another partition"
        )
    return found


def device_count(config: DataConfig, train_users: Ints | None) -> int:
    """`data.devices` if it was given, which may not exceed the number of users, else that number."""
    users = len(users_of(train_users))
    if "devices" not in config.model_fields_set:
        return users
    if config.devices > users:
        raise FeddumapError(
            f"data.devices = {config.devices}: expected at most {users}, the number of users with training "
            "samples; lower it or leave it out"
        )
    return config.devices


def natural(train_users: Ints | None, config: DataConfig, seed: int) -> NaturalParts:
    """Each device is a user; with fewer devices than users, the users are drawn by the seed.

    The pool is the samples of nobody; if there are none, a random fifth of each user's samples, of whom every
    one keeps at least one.
    """
    users = users_of(train_users)
    assert train_users is not None
    chosen = np.sort(stream(seed, "partition", "users").permutation(users)[: config.devices])
    order = np.argsort(train_users, kind="stable")
    ordered = train_users[order]
    starts, stops = (np.searchsorted(ordered, chosen, side=side) for side in ("left", "right"))
    held = [order[start:stop] for start, stop in zip(starts, stops, strict=True)]
    pool = np.flatnonzero(train_users < 0)
    if not len(pool):
        rng = stream(seed, "partition", "pool")
        shuffled = [rng.permutation(own) for own in held]
        given = [len(own) // POOL_SHARE for own in held]  # 0 of fewer than five: one always stays
        pool = np.sort(np.concatenate([own[:n] for own, n in zip(shuffled, given, strict=True)]))
        held = [np.sort(own[n:]) for own, n in zip(shuffled, given, strict=True)]
    return NaturalParts(np.concatenate(held), np.array([len(own) for own in held]), pool)
