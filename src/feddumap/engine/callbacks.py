"""What is called after each round of a run, and may stop it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from feddumap.core.record import Record
from feddumap.errors import FeddumapError

Callback = Callable[[Any, Record], object]
"""Called with the run and the record of the round that has just finished; True stops the run. A callback with
a method `replay(run)` is asked, when a run is resumed, whether its records stop it already."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stops a run when the `measure` has not improved by more than `min_delta` in `patience` evaluations:
    `accuracy` on the test data, or `validation`, the accuracy on `data.validation` samples of the server.

    It looks at the records only, so that a resumed run stops at the same round.
    """

    patience: int = 10
    measure: Literal["accuracy", "validation"] = "accuracy"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise FeddumapError(f"EarlyStopping(patience={self.patience}): expected 1 or more evaluations")
        if self.measure not in ("accuracy", "validation"):
            raise FeddumapError(
                f"EarlyStopping(measure={self.measure!r}): expected 'accuracy' or 'validation'"
            )

    def __call__(self, run: Any, record: Record) -> bool:
        if self.measure == "validation" and not run.config.data.validation:
            raise FeddumapError(
                "EarlyStopping(measure='validation') needs held-out samples: set validation (data.validation)"
            )
        return self.due(run.records)

    def replay(self, run: Any) -> bool:
        return self.due(run.records)

    def due(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these records stop a run.

        >>> stopping = EarlyStopping(patience=2)
        >>> curve = [{"accuracy": accuracy} for accuracy in (0.1, 0.3, 0.2, 0.3)]
        >>> stopping.due(curve[:3]), stopping.due(curve)
        (False, True)
        """
        best, since = float("-inf"), 0
        for value in (each for record in records if (each := self._value(record)) is not None):
            best, since = (value, 0) if value > best + self.min_delta else (best, since + 1)
        return since >= self.patience

    def _value(self, record: Mapping[str, Any]) -> float | None:
        if self.measure == "accuracy":
            return record.get("accuracy")
        return (record.get("validation") or {}).get("accuracy")
