"""The summary of a run: accuracy curves smoothed as in the paper, targets, and whether it is finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddumap.runs.reader import read_config, read_records
from feddumap.system.json_text import parse_json

WINDOW, ORDER = 39, 3


def smooth(values: Sequence[float]) -> np.ndarray:
    """Accuracies smoothed by Savitzky-Golay, window 39, order 3.

    A cubic fitted to a whole short curve overshoots at its ends, so the window of a curve of fewer than 39
    points is a third of its length, and a curve of fewer than 15 points is not smoothed.

    >>> smooth([0.1, 0.5]).tolist()
    [0.1, 0.5]
    >>> cubic = [(x / 50) ** 3 for x in range(50)]
    >>> bool(np.allclose(smooth(cubic), cubic))
    True
    """
    curve = np.asarray(values, dtype=np.float64)
    third = len(curve) // 3
    window = WINDOW if len(curve) >= WINDOW else third - (third + 1) % 2
    if window <= ORDER:
        return curve
    from scipy.signal import savgol_filter  # slow to import, and needed only at the end

    smoothed: np.ndarray = savgol_filter(curve, window, ORDER)
    return smoothed.clip(0.0, 1.0)  # a cubic overshoots behind a steep rise


def evaluated(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of the rounds with an evaluation."""
    return [record for record in records if record.get("accuracy") is not None]


def reached(records: Sequence[Mapping[str, Any]], target: float) -> dict[str, float] | None:
    """Round and clock when the smoothed accuracy first reaches `target`, or None."""
    points = evaluated(records)
    above = np.flatnonzero(smooth([point["accuracy"] for point in points]) >= target)
    if not len(above):
        return None
    first = points[int(above[0])]
    return {"round": first["round"], "clock": first["clock"]}


def accuracies(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """final: the last evaluation; mean10: the mean of the last ten; best; best_smoothed: as in the paper;
    validated: at the best smoothed validation accuracy (within the server's classes, where that is recorded),
    if every evaluation recorded one."""
    points = evaluated(records)
    values = [point["accuracy"] for point in points]
    if not values:
        return {"final": None, "mean10": None, "best": None, "best_smoothed": None, "validated": None}
    scores = [point["validation"] for point in points if "validation" in point]
    held = [score.get("within", score["accuracy"]) for score in scores]
    return {
        "final": values[-1],
        "mean10": float(np.mean(values[-10:])),
        "best": max(values),
        "best_smoothed": float(smooth(values).max()),
        "validated": values[int(smooth(held).argmax())] if len(held) == len(values) else None,
    }


def device_accuracy(records: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Mean, worst tenth, spread and number of the devices with test data of their own at the last evaluation;
    None if there are none."""
    points = evaluated(records)
    return points[-1].get("device_accuracy") if points else None


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary.json of a run directory; None if it is missing or unreadable."""
    try:
        summary = parse_json((path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def is_complete(records: Sequence[Mapping[str, Any]], rounds: int, target: float | None) -> bool:
    """Whether all rounds are done or the target was reached."""
    return len(records) >= rounds or (target is not None and reached(records, target) is not None)


def finished(path: Path) -> bool:
    """Whether the run in a directory is finished.

    The summary is written when a run finishes, with the configured number of rounds. If the run was extended
    since, its configuration has more rounds, or it has more records than the summary counts. Summaries of
    older versions lack the configured rounds; among their methods only FedKT has a single round.
    """
    summary, records = read_summary(path), read_records(path)
    if summary is None or summary.get("rounds") != len(records):
        return False
    config = read_config(path)
    configured = summary.get("configured_rounds")
    if configured is not None:
        return bool(configured == config.train.rounds)
    rounds = 1 if config.method.name == "fedkt" else config.train.rounds
    return is_complete(records, rounds, config.run.target)


def missing_devices(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int, str]]:
    """Devices that were lost or refused: the device, the number of rounds, the last one and its reason.

    >>> missing_devices([{"round": 0, "lost": {"3": "it left"}}, {"round": 2, "lost": {"3": "it is late"}}])
    [(3, 2, 2, 'it is late')]
    """
    found: dict[int, tuple[int, int, str]] = {}
    for record in records:
        for device, reason in record.get("lost", {}).items():
            found[int(device)] = (found.get(int(device), (0, 0, ""))[0] + 1, record["round"], reason)
    return [(device, *found[device]) for device in sorted(found)]
