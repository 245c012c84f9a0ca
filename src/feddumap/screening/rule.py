"""What all rules of `[aggregate]` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from feddumap.config import AggregateConfig
from feddumap.core.algorithm import RoundView
from feddumap.core.messages import Tensors, Upload
from feddumap.core.screening import Parts, ScreeningRound
from feddumap.core.tensors import weighted_mean
from feddumap.errors import FeddumapError


class Rule(ScreeningRound):
    """A `ScreeningRound` that admits every upload and takes the weighted mean; rules override what they
    change. `left_out` names the devices whose uploads do not count, with the reason."""

    def __init__(self, tensors: Tensors, view: RoundView) -> None:
        self.tensors, self.view = tensors, view
        self.left_out: dict[str, str] = {}

    @property
    def settings(self) -> AggregateConfig:
        return self.view.context.config.aggregate

    def admit(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
        yield from uploads

    def combine(self, parts: Parts) -> Tensors:
        return weighted_mean(parts)

    def end(self) -> tuple[Tensors, dict[str, Any]]:
        return self.tensors, {"left_out": self.left_out} if self.left_out else {}


class MeanReplacement(Rule):
    """A rule in place of the weighted mean. A method that makes its model without it is an error."""

    called = False

    def combine(self, parts: Parts) -> Tensors:
        self.called = True
        models = [tensors for weight, tensors in parts if weight > 0]
        if not models:
            raise ValueError("the mean of no parts")
        return self.center(models)

    def center(self, models: list[Tensors]) -> Tensors:
        """One model in place of several."""
        raise NotImplementedError

    def end(self) -> tuple[Tensors, dict[str, Any]]:
        if not self.called:
            raise FeddumapError(
                f"aggregate.name = {self.settings.name!r} replaces the mean of the models, but the aggregate "
                f"of method {self.view.context.config.method.name!r} does not call view.combine: call it "
                'there in place of a mean of your own, or choose "clipped", "krum", "multi-krum" or "trust"'
            )
        return super().end()
