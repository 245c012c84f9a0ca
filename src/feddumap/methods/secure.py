"""Which methods go with secure aggregation: the server sees the mean of the uploads and no single one."""

from __future__ import annotations

from feddumap.config import Config
from feddumap.core.algorithm import Algorithm
from feddumap.errors import FeddumapError
from feddumap.methods.registry import compose

FEWEST, MOST = 3, 1000  # devices of a round: of two, each knows the other's; the sum of more could overflow


def obstacle(algorithm: Algorithm) -> str | None:
    """Why a method does not go with secure aggregation, or None if it does."""
    if algorithm.needs_single_uploads:
        return "the server needs the upload of every single device"
    if algorithm.uploads_extra:
        return "devices upload other tensors besides the model, which are not masked"
    return None


def check(config: Config) -> None:
    """An error if `run.secure` is set for a run that cannot have it."""
    if not config.run.secure:
        return
    if config.run.engine != "flower":
        raise FeddumapError(
            f"run.secure = true with run.engine = {config.run.engine!r}: expected 'flower', since there is "
            "nothing to hide from the server in a simulation"
        )
    if config.aggregate.name != "mean":
        raise FeddumapError(
            f"run.secure = true with aggregate.name = {config.aggregate.name!r}: the rule needs every single "
            "upload, which the server does not see; set aggregate.name = 'mean'"
        )
    if config.privacy.on:
        raise FeddumapError(
            "run.secure = true cannot go with [privacy]: the server clips every single upload, which it does "
            "not see; leave one of them out"
        )
    if reason := obstacle(compose(config)):
        raise FeddumapError(
            f"run.secure = true with method.name = {config.method.name!r}: {reason}; docs/deploy.md lists "
            "the methods that go with secure aggregation"
        )
    if not FEWEST <= config.train.cohort <= MOST:
        raise FeddumapError(
            f"run.secure = true with train.cohort = {config.train.cohort}: expected {FEWEST} to {MOST} "
            "devices in a round"
        )
