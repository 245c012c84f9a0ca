"""The screenings that a configuration can ask for, one file for each family of rules."""

from __future__ import annotations

from dataclasses import replace

from feddumap.config import Config
from feddumap.core.algorithm import Algorithm, Labels
from feddumap.core.screening import NO_SCREENING, Screening
from feddumap.errors import FeddumapError
from feddumap.screening import privacy
from feddumap.screening.clipped import Clipped
from feddumap.screening.coordinatewise import Median, Trimmed, trimmed_count
from feddumap.screening.geometric_median import GeometricMedian
from feddumap.screening.krum import Krum, MultiKrum, hostile_count
from feddumap.screening.rule import MeanReplacement, Rule
from feddumap.screening.trust import Trust

RULES: dict[str, type[Rule]] = {
    "clipped": Clipped,
    "median": Median,
    "trimmed": Trimmed,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "geometric-median": GeometricMedian,
    "trust": Trust,
}
"""The rules of `[aggregate]` besides the mean."""


def of(config: Config, algorithm: Algorithm, known: bool) -> Screening:
    """The screening that a configuration asks for; an error if the method cannot be private. `known` says
    that it is one of this package."""
    name = config.aggregate.name
    if config.privacy.on:
        if name != "mean":
            raise FeddumapError(
                f"aggregate.name = {name!r} cannot go with [privacy]: the noise is calibrated to a sum of "
                "clipped uploads; use mean, or leave [privacy] out"
            )
        return privacy.private(config, algorithm, known)
    return NO_SCREENING if name == "mean" else Screening(begin=RULES[name])


def screened(config: Config, algorithm: Algorithm, made: Algorithm, known: bool) -> Algorithm:
    """An algorithm with the screening that a configuration asks for; `trust` needs the devices' labels.
    `made` is the algorithm as the method made it, without the checks of a user's slots."""
    told = config.aggregate.name == "trust" and algorithm.labels == "none"
    labels: Labels = "counts" if told else algorithm.labels
    return replace(algorithm, screening=of(config, made, known), labels=labels)


def check(config: Config, algorithm: Algorithm, server_samples: int) -> None:
    """Raise an error for a rule that cannot go with the method, the cohort or the server's data."""
    aggregate, method = config.aggregate, config.method.name
    if aggregate.name == "mean":
        return
    chosen = f"aggregate.name = {aggregate.name!r}"
    rule, cohort = RULES[aggregate.name], len(algorithm.choose(config, 0))
    if not algorithm.updates:
        raise FeddumapError(
            f"{chosen} cannot go with method.name = {method!r}: it compares updates of the model that was "
            'sent, but devices send other models here; set aggregate.name = "mean" or choose another method'
        )
    if issubclass(rule, MeanReplacement) and algorithm.beside_mean:
        raise FeddumapError(
            f"{chosen} cannot go with method.name = {method!r}: it replaces the mean of the models, but the "
            f'method also uses {algorithm.beside_mean}; choose "clipped", "krum", "multi-krum" or "trust"'
        )
    hostile = hostile_count(aggregate.hostile, cohort)
    if issubclass(rule, MultiKrum) and cohort < 2 * hostile + 3:
        raise FeddumapError(
            f"{chosen} with aggregate.hostile = {aggregate.hostile:g} needs at least {2 * hostile + 3} "
            f"devices a round, but train.cohort = {cohort}: raise the one or lower the other"
        )
    if rule is Trimmed and not trimmed_count(aggregate.trim, cohort):
        raise FeddumapError(
            f"aggregate.trim = {aggregate.trim:g} of train.cohort = {cohort} is no device: raise one of them"
        )
    if rule is Trust and not server_samples:
        raise FeddumapError(
            f"{chosen} needs images on the server, but data.server_fraction = "
            f"{config.data.server_fraction:g} gives none: raise it"
        )
