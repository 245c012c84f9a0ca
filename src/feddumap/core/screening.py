"""Screening: what happens to uploads between their arrival and a method's aggregation, whatever the method.

Robust aggregation and differential privacy are screenings: they clip, weigh or leave out uploads as they pass
(`admit`), replace the weighted mean (`combine`), and keep tensors of their own from round to round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from feddumap.core.messages import ServerState, Tensors, Upload
from feddumap.core.tensors import weighted_mean

if TYPE_CHECKING:
    from feddumap.core.algorithm import Cohort, Context, RoundView

Parts = Iterable[tuple[float, Tensors]]
"""Weights n_k and tensors, one upload after another."""

Combine = Callable[[Parts], Tensors]
"""How a method makes one set of tensors of several: the weighted mean, unless the screening replaces it."""

PREFIX = "screening/"
"""The names of a screening's tensors in `ServerState.steps`."""


class ScreeningRound(Protocol):
    """A screening at work in one round."""

    def admit(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
        """The uploads that count, as they count."""
        ...

    def combine(self, parts: Parts) -> Tensors:
        """One set of tensors; methods call it as `view.combine`."""
        ...

    def disclose(self, view: RoundView) -> RoundView:
        """What the server steps may see of the round."""
        return view

    def end(self) -> tuple[Tensors, dict[str, Any]]:
        """The screening's tensors after the round, and what it reports for the record."""
        ...


@dataclass(frozen=True)
class Screening:
    """`begin` starts a round, given the screening's tensors (none before the first round). `asked` is what a
    reshaping step may see and whom it may ask. With `empty_rounds`, a round without any upload is aggregated
    as well."""

    begin: Callable[[Tensors, RoundView], ScreeningRound]
    asked: Callable[[ServerState, Context, Cohort], tuple[Context, Cohort]] = lambda _, *given: given
    empty_rounds: bool = False


class _Everything(ScreeningRound):
    """Every upload counts as it is, in the weighted mean."""

    def admit(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
        yield from uploads

    def combine(self, parts: Parts) -> Tensors:
        return weighted_mean(parts)

    def end(self) -> tuple[Tensors, dict[str, Any]]:
        return {}, {}


NO_SCREENING = Screening(begin=lambda tensors, view: _Everything())
"""Every upload counts as it is."""


def separate_tensors(steps: Tensors) -> tuple[Tensors, Tensors]:
    """The screening's own tensors, by their names there, and those of the server steps."""
    own = {name.removeprefix(PREFIX): tensor for name, tensor in steps.items() if name.startswith(PREFIX)}
    return own, {name: tensor for name, tensor in steps.items() if not name.startswith(PREFIX)}
