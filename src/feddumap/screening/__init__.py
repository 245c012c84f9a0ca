"""The screenings that a configuration can ask for, one file for each family of rules."""

from __future__ import annotations

from dataclasses import replace

from feddumap.config import Config
from feddumap.core.algorithm import Algorithm
from feddumap.core.screening import NO_SCREENING, Screening
from feddumap.errors import FeddumapError
from feddumap.screening import privacy


def of(config: Config, algorithm: Algorithm) -> Screening:
    """The screening of a configuration; an error if the method cannot go with it."""
    if config.privacy.on:
        rule = getattr(getattr(config, "aggregate", None), "name", "mean")
        if rule != "mean":
            raise FeddumapError(
                f"aggregate.name = {rule!r} cannot go with [privacy]: the noise is calibrated to a sum of "
                "clipped uploads; use mean, or leave [privacy] out"
            )
        return privacy.private(config, algorithm)
    return NO_SCREENING


def screened(config: Config, algorithm: Algorithm, made: Algorithm) -> Algorithm:
    """An algorithm with the screening of a configuration; `made` is the method's own, without the checks of
    its slots, which tells what its slots are."""
    return replace(algorithm, screening=of(config, made))
