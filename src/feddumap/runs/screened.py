"""The devices whose uploads a defence left out or clipped, from the records of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ScreenedDevice:
    """How many uploads of a device arrived, were left out and were clipped; the newest reason; and whether
    the device is one of those that `[attack]` made hostile."""

    device: int
    uploads: int
    left_out: int
    clipped: int
    hostile: bool
    reason: str


def screened_devices(records: Sequence[Mapping[str, Any]], hostile: Collection[int]) -> list[ScreenedDevice]:
    """Those left out most often first, then those clipped most often.

    >>> record = {"devices": [1, 4, 7], "left_out": {"4": "too far"}, "clipped": {"7": 0.5}}
    >>> [(each.device, each.left_out, each.clipped) for each in screened_devices([record] * 2, ())]
    [(4, 2, 0), (7, 0, 2)]
    """
    uploads: Counter[int] = Counter()
    left_out: Counter[int] = Counter()
    clipped: Counter[int] = Counter()
    reasons: dict[int, str] = {}
    for record in records:
        uploads.update(record.get("devices", []))
        told = {int(device): str(reason) for device, reason in record.get("left_out", {}).items()}
        left_out.update(told.keys())
        clipped.update(int(device) for device in record.get("clipped", {}))
        reasons |= told
    found = [
        ScreenedDevice(
            device,
            uploads[device],
            left_out[device],
            clipped[device],
            device in hostile,
            reasons.get(device, ""),
        )
        for device in left_out.keys() | clipped.keys()
    ]
    return sorted(found, key=lambda each: (-each.left_out, -each.clipped, each.device))
