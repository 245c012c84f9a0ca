"""What cells of a grid take besides their rounds: starting a process, reading data, writing the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import mean


class Overhead:
    """Measures it while a grid is trained. Cells begin in their order, `jobs` at first and then one whenever
    another ends."""

    def __init__(self, cells: Sequence[str], jobs: int, now: float) -> None:
        self._waiting = list(cells)
        self._began: dict[str, float] = {}
        self._found: dict[str, float] = {}
        for _ in range(jobs):
            self._begin(now)

    def _begin(self, now: float) -> None:
        if self._waiting:
            self._began[self._waiting.pop(0)] = now

    @property
    def started(self) -> Collection[str]:
        """The cells that have trained a round since."""
        return self._found.keys()

    def trained(self, cell: str, seconds: float, now: float) -> None:
        """So many seconds went into rounds of this cell since it began."""
        if seconds and cell not in self._found:
            self._found[cell] = max(0.0, now - self._began.get(cell, now) - seconds)

    def ended(self, cell: str, seconds: float, now: float) -> None:
        """The cell has ended; so many seconds went into its rounds since it began."""
        self._found[cell] = max(0.0, now - self._began.get(cell, now) - seconds)
        self._begin(now)

    def mean(self) -> float | None:
        """Seconds per cell, None before any cell has trained a round."""
        return mean(self._found.values()) if self._found else None
