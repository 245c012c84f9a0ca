"""What a reader of a comparison must know: runs unlike the others, and tests that could not be made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from feddumap.config import Config
from feddumap.report.series import Series
from feddumap.report.statistics import Comparison

# rounds have a note of their own; the others may differ between series that are fairly compared
NOT_COMPARED: Any = {"train": {"rounds", "stack"}, "run": True, "method": True}


def notes(found: Sequence[Series], value: Comparison) -> tuple[str, ...]:
    """The caveats of a comparison, a sentence each; none if there is nothing to say."""
    return (
        *_rounds(value),
        *_unfinished(value),
        *_evaluations(value),
        *_settings(found, value),
        *_tests(value),
    )


def _rounds(value: Comparison) -> Iterator[str]:
    counts = Counter(run.rounds for row in value.rows for run in row.runs)
    if len(counts) < 2:
        return
    told = []
    for rounds, runs in counts.most_common():
        some = _who(value, {run.path for row in value.rows for run in row.runs if run.rounds == rounds})
        told.append(f"{rounds} in {'most' if 2 * runs > counts.total() else some}")
    yield f"The runs differ in their number of rounds, and each counts as it is: {'; '.join(told)}."


def _unfinished(value: Comparison) -> Iterator[str]:
    found = [
        f"{row.label} seed {run.seed} ({run.rounds} of {run.rounds_configured} rounds)"
        for row in value.rows
        for run in row.runs
        if not run.finished
    ]
    if found:
        yield f"Not finished, and counted as far as they are: {', '.join(found)}."


def _evaluations(value: Comparison) -> Iterator[str]:
    runs = [run for row in value.rows for run in row.runs]
    if without := _who(value, {run.path for run in runs if run.evaluations == 0}):
        yield f"Not evaluated yet, and therefore without an accuracy: {without}."
    if few := _who(value, {run.path for run in runs if 0 < run.evaluations < 10}):
        yield f"Fewer than ten evaluated rounds, so that the mean of the last 10 is of all there are: {few}."


def _settings(found: Sequence[Series], value: Comparison) -> Iterator[str]:
    base = next(_settings_of(each.config) for each in found if each.label == value.base)
    unlike: dict[str, list[str]] = {}
    for each in found:
        own = _settings_of(each.config)
        keys = [key for key in own if own[key] != base[key]]
        if keys:
            unlike.setdefault(", ".join(keys), []).append(each.label)
    if unlike:
        told = "; ".join(f"{keys} in {', '.join(labels)}" for keys, labels in unlike.items())
        yield f"Settings other than the method's differ from those of {value.base}: {told}."


def _settings_of(config: Config) -> dict[str, Any]:
    dumped = config.model_dump(exclude=NOT_COMPARED)
    return {f"{section}.{key}": value for section, keys in dumped.items() for key, value in keys.items()}


def _tests(value: Comparison) -> Iterator[str]:
    differences = {row.label: row.difference for row in value.rows if row.difference is not None}
    if differences and all(each.p is None for each in differences.values()):
        yield f"No test against {value.base}: it needs at least two common seeds."
    constant = [label for label, each in differences.items() if each.constant]
    if constant:
        yield (
            f"The difference to {value.base} is the same in every seed, so that there is no noise to compare "
            f"it with and p is a limit: {', '.join(constant)}."
        )


def _who(value: Comparison, paths: set[str]) -> str:
    """The runs of these paths, as briefly as can be: all runs, a series, or some seeds of it."""
    parts = []
    for row in value.rows:
        seeds = [str(run.seed) for run in row.runs if run.path in paths]
        if len(seeds) == len(row.runs):
            parts.append(row.label)
        elif seeds:
            parts.append(f"{row.label} (seed {', '.join(seeds)})")
    return "all runs" if parts == [row.label for row in value.rows] else ", ".join(parts)
