"""Who is waited for, and why, in a sentence that is repeated rarely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIRST_WORD, NEXT_WORD, SAME_WORD = 5.0, 10.0, 120.0  # seconds until a first, another and the same sentence
SHOWN_REASONS, SHOWN_DEVICES = 4, 10


@dataclass
class Report:
    """Says who is waited for, and why: soon at first, then when it changes, and otherwise rarely."""

    began: float
    _last: float | None = None
    _shown: str = ""

    def text(self, missing: Mapping[int, str], unidentified: int, now: float) -> str | None:
        """What to say now, if anything; `unidentified` nodes have not said yet which device they are."""
        if now - self.began < FIRST_WORD:
            return None
        said = f"waiting for {len(missing)} of the devices ({listed(missing)})"
        said += f"; {unidentified} connected nodes have not said yet who they are" if unidentified else ""
        quiet = NEXT_WORD if said != self._shown else SAME_WORD
        if self._last is not None and now - self._last < quiet:
            return None
        self._last, self._shown = now, said
        return said


def listed(reasons: Mapping[int, str]) -> str:
    """Devices by the reason why they are missing.

    >>> listed({1: "it is late", 4: "it left", 5: "it is late"})
    'device 1, 5: it is late; device 4: it left'
    """
    groups: dict[str, list[int]] = {}
    for device, reason in reasons.items():
        groups.setdefault(reason, []).append(device)
    parts = []
    for reason, devices in list(groups.items())[:SHOWN_REASONS]:
        numbers = ", ".join(map(str, devices[:SHOWN_DEVICES]))
        rest = f" and {len(devices) - SHOWN_DEVICES} more" if len(devices) > SHOWN_DEVICES else ""
        parts.append(f"device {numbers}{rest}: {reason}")
    more = sum(map(len, list(groups.values())[SHOWN_REASONS:]))
    return "; ".join(parts) + (f"; and {more} more" if more else "")
