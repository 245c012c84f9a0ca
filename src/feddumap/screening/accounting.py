"""ε of a private run, by the Rényi accountant of Google's dp-accounting, and the noise for a target ε.

With poisson sampling two sets of devices are neighbours if one has a device more than the other, and the sum
of uploads of norm at most S changes by at most S. With fixed sampling they are neighbours if one device is
replaced by another, the sum changes by up to 2 S, and the number of devices is public.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from feddumap.errors import FeddumapError

ORDERS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 512)
"""The orders α at which divergences are computed: those of TensorFlow Privacy without 256, which is slow."""

MOST_NOISE = math.log(1e5)
TOLERANCE = 1e-3  # relative, of ε


@dataclass(frozen=True)
class Releases:
    """What a run releases of its devices. In each round, a sum over a sample of `cohort` of the `devices`
    with Gaussian noise of `multiplier` times the norm of a device's largest contribution; and, once
    `rate_round` rounds have finished, the sum of all devices' pruning rates, each from 0 to 1, with noise of
    standard deviation `rate_noise`, if any."""

    devices: int
    cohort: int
    sampling: Literal["poisson", "fixed"]
    multiplier: float
    rate_noise: float | None = None
    rate_round: int = 0

    def epsilon(self, rounds: int, delta: float) -> float:
        """ε at `delta` after so many rounds."""
        divergences = rounds * np.asarray(
            _round_divergences(self.sampling, self.devices, self.cohort, self.multiplier)
        )
        if self.rate_noise is not None and rounds > self.rate_round:
            divergences = divergences + np.asarray(ORDERS) / (2 * self.rate_noise**2)
        with _quiet():
            found, _ = _library().rdp.compute_epsilon(ORDERS, divergences, delta)
        return float(found)


@lru_cache(maxsize=64)
def _round_divergences(sampling: str, devices: int, cohort: int, multiplier: float) -> tuple[float, ...]:
    """The Rényi divergences of one round at `ORDERS`, infinite where they are not known."""
    library = _library()
    relations = library.NeighboringRelation
    if sampling == "poisson":
        noise = library.GaussianDpEvent(multiplier)
        event, relation = library.PoissonSampledDpEvent(cohort / devices, noise), relations.ADD_OR_REMOVE_ONE
    else:
        noise = library.GaussianDpEvent(multiplier / 2)  # a replaced upload changes the sum by up to 2 S
        event = library.SampledWithoutReplacementDpEvent(devices, cohort, noise)
        relation = relations.REPLACE_ONE
    with _quiet():
        accountant = library.rdp.RdpAccountant(ORDERS, relation).compose(event)
    return tuple(float(value) for value in accountant.rdp)


def calibrated(releases: Releases, rounds: int, epsilon: float, delta: float) -> Releases:
    """The releases with the multiplier for which ε is at most `epsilon`, and less than it by a thousandth at
    most."""
    from scipy.optimize import brentq  # slow to import

    aim = math.log(epsilon * (1 - TOLERANCE / 2))

    def excess(log_multiplier: float) -> float:
        found = replace(releases, multiplier=math.exp(log_multiplier)).epsilon(rounds, delta)
        return math.log(found) - aim if found else -math.inf

    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + 1
        if high > MOST_NOISE:
            raise FeddumapError(
                f"privacy.epsilon = {epsilon:g} cannot be had with any noise at δ = {delta:g}: give a larger "
                "one, or raise privacy.rate_noise if the method asks devices for pruning rates"
            )
    while excess(low) <= 0:
        low, high = low - 1, low
    root = float(brentq(excess, low, high, xtol=TOLERANCE / 20))
    while excess(root) > TOLERANCE / 2:
        root += TOLERANCE / 20
    return replace(releases, multiplier=math.exp(root))


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        import dp_accounting
        from dp_accounting import rdp  # noqa: F401 (a submodule)
    except ImportError as error:
        raise FeddumapError(
            f"[privacy] needs the package dp-accounting ({error}): pip install 'feddumap[privacy]'"
        ) from None
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings about orders that are left out, since the others give a valid ε."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
