"""Notes on a comparison: runs that differ from the others, and tests that are not possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from feddumap.config import Config
from feddumap.methods.idle import unreached
from feddumap.report.series import Series
from feddumap.report.statistics import Comparison
from feddumap.runs import privacy

# rounds have a separate note; the others may differ in a fair comparison
NOT_COMPARED: Any = {"train": {"rounds", "stack"}, "run": True, "method": True}


def notes(found: Sequence[Series], value: Comparison) -> tuple[str, ...]:
    """The notes of a comparison, one sentence each."""
    return (
        *_rounds(value),
        *_unfinished(value),
        *_evaluations(value),
        *_never_reached(found),
        *_settings(found, value),
        *_tests(value),
        *_privacy(found),
    )


def _rounds(value: Comparison) -> Iterator[str]:
    counts = Counter(run.rounds for row in value.rows for run in row.runs)
    if len(counts) < 2:
        return
    told = []
    for rounds, runs in counts.most_common():
        some = _who(value, {run.path for row in value.rows for run in row.runs if run.rounds == rounds})
        told.append(f"{rounds} in {'most' if 2 * runs > counts.total() else some}")
    yield f"The runs differ in their numbers of rounds: {'; '.join(told)}."


def _unfinished(value: Comparison) -> Iterator[str]:
    found = [
        f"{row.label} seed {run.seed} ({run.rounds} of {run.rounds_configured} rounds)"
        for row in value.rows
        for run in row.runs
        if not run.finished
    ]
    if found:
        yield f"Not finished, included with the rounds so far: {', '.join(found)}."


def _evaluations(value: Comparison) -> Iterator[str]:
    runs = [run for row in value.rows for run in row.runs]
    if without := _who(value, {run.path for run in runs if run.evaluations == 0}):
        yield f"Not evaluated yet, so without an accuracy: {without}."
    if few := _who(value, {run.path for run in runs if 0 < run.evaluations < 10}):
        yield f"Fewer than ten evaluated rounds, so the mean of the last 10 is over all of them: {few}."


def _never_reached(found: Sequence[Series]) -> Iterator[str]:
    labels: dict[str, list[str]] = {}
    for each in found:
        for sentence in unreached(each.config):
            labels.setdefault(sentence, []).append(each.label)
    for sentence, named in labels.items():
        yield f"{sentence} ({', '.join(named)})."


def _settings(found: Sequence[Series], value: Comparison) -> Iterator[str]:
    base = next(_settings_of(each.config) for each in found if each.label == value.base)
    unlike: dict[str, list[str]] = {}
    for each in found:
        own = _settings_of(each.config)
        keys = [key for key in {**base, **own} if own.get(key) != base.get(key)]
        if keys:
            unlike.setdefault(", ".join(keys), []).append(each.label)
    if unlike:
        told = "; ".join(f"{keys} in {', '.join(labels)}" for keys, labels in unlike.items())
        yield f"Settings outside [method] differ from those of {value.base}: {told}."


def _settings_of(config: Config) -> dict[str, Any]:
    dumped = config.model_dump(exclude=NOT_COMPARED)
    return {f"{section}.{key}": value for section, keys in dumped.items() for key, value in keys.items()}


def _tests(value: Comparison) -> Iterator[str]:
    differences = {row.label: row.difference for row in value.rows if row.difference is not None}
    if differences and all(each.p is None for each in differences.values()):
        yield f"No significance test against {value.base}: it needs at least two common seeds."
    constant = [label for label, each in differences.items() if each.constant]
    if constant:
        yield (
            f"The difference to {value.base} is the same for every seed, so its variance is zero and p is a "
            f"limit: {', '.join(constant)}."
        )


def _privacy(found: Sequence[Series]) -> Iterator[str]:
    for each in found:
        told = [privacy.describe(run.config, run.records) for run in each.runs]
        if private := [value for value in told if value is not None]:
            largest = max(private, key=lambda value: value["epsilon"] or 0.0)
            yield f"Privacy of {each.label}: {privacy.statement(largest)}."


def _who(value: Comparison, paths: set[str]) -> str:
    """The runs with these paths, abbreviated to all runs, a series, or some seeds of a series."""
    parts = []
    for row in value.rows:
        seeds = [str(run.seed) for run in row.runs if run.path in paths]
        if len(seeds) == len(row.runs):
            parts.append(row.label)
        elif seeds:
            parts.append(f"{row.label} (seed {', '.join(seeds)})")
    return "all runs" if parts == [row.label for row in value.rows] else ", ".join(parts)
