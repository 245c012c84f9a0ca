"""Statistics of series over seeds: accuracy, time to target, cost, and the test against a base.

Pure functions; `comparison` renders the results as tables, `notes` adds caveats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, mean, stdev
from typing import Any, Literal, get_args

from feddumap.errors import FeddumapError
from feddumap.report.series import RecordedRun, Series
from feddumap.runs.summary import evaluated, reached

AccuracyMeasure = Literal["final", "mean10", "best_smoothed"]
MEASURES: tuple[AccuracyMeasure, ...] = get_args(AccuracyMeasure)
COSTS = ("parameters", "macs", "bytes_down", "bytes_up", "clock")
LEVEL = 0.95  # of the confidence interval
ROUNDING = 1e-12  # accuracies are ratios of image counts: smaller differences are rounding errors


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (divisor n - 1) over n seeds; None with one seed."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class RunStatistics:
    """One run: accuracies, round and clock when it reached each target (or None), and total costs."""

    path: str
    seed: int
    rounds: int
    rounds_configured: int
    finished: bool
    evaluations: int
    accuracy: dict[str, float | None]
    targets: dict[str, dict[str, float] | None]
    cost: dict[str, float]


@dataclass(frozen=True)
class TimeToTarget:
    """The number of seeds that reached a target. The mean clock, and its ratio to the base's, are given only
    if all seeds did, because a mean over the fast seeds alone is biased."""

    target: float
    reached: int
    seeds: int
    clock: Spread | None
    ratio: float | None = None


@dataclass(frozen=True)
class Difference:
    """Difference in accuracy to the base, paired over common seeds: mean, confidence interval and p of a
    paired t-test, and p after Holm's adjustment. With fewer than two common seeds all but `seeds` are
    None."""

    seeds: tuple[int, ...]
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    holm: float | None = None
    constant: bool = False


@dataclass(frozen=True)
class SeriesStatistics:
    """One series: spreads over its seeds, and its runs. `difference` is None for the base."""

    label: str
    method: str
    model: str
    data: str
    accuracy: dict[str, Spread | None]
    times: tuple[TimeToTarget, ...]
    cost: dict[str, Spread]
    difference: Difference | None
    runs: tuple[RunStatistics, ...]


@dataclass(frozen=True)
class Comparison:
    """All series compared with one base; `measure` is the accuracy measure of the test."""

    base: str
    measure: AccuracyMeasure
    targets: tuple[float, ...]
    rows: tuple[SeriesStatistics, ...]


def compare(
    found: Sequence[Series],
    targets: Sequence[float] = (),
    base: str | None = None,
    measure: AccuracyMeasure = "mean10",
) -> Comparison:
    """Compare series. Runs are not truncated to equal numbers of rounds.

    `targets` defaults to those of the runs, `base` to the first FedAvg series with the most seeds, else
    to the first series.
    """
    wanted = targets_of(found, targets)
    against = base_of(found, base)
    figures = {each.label: tuple(run_statistics(run, wanted) for run in each.runs) for each in found}
    times = {label: [time_to_target(runs, target) for target in wanted] for label, runs in figures.items()}
    tested = _tests(figures, against, measure)
    rows = [
        SeriesStatistics(
            label=each.label,
            method=each.config.method.name,
            model=each.config.model.name,
            data=each.config.data.name,
            accuracy={name: spread([run.accuracy[name] for run in figures[each.label]]) for name in MEASURES},
            times=tuple(map(_with_ratio, times[each.label], times[against])),
            cost={name: _spread([run.cost[name] for run in figures[each.label]]) for name in COSTS},
            difference=tested.get(each.label),
            runs=figures[each.label],
        )
        for each in found
    ]
    return Comparison(against, measure, wanted, tuple(rows))


def base_of(found: Sequence[Series], label: str | None) -> str:
    """The label of the base series."""
    labels = [each.label for each in found]
    if label is None:
        plain = [each for each in found if each.config.method.name == "fedavg"]
        return max(plain, key=lambda each: len(each.runs)).label if plain else labels[0]
    if label not in labels:
        known = ", ".join(repr(each) for each in labels)
        raise FeddumapError(f"--base {label!r} is not a series: expected one of {known}")
    return label


def targets_of(found: Sequence[Series], given: Sequence[float]) -> tuple[float, ...]:
    """The given targets, else those of the runs' configurations, in ascending order."""
    for target in given:
        if not 0 <= target <= 1:
            raise FeddumapError(
                f"--target {target:g}: expected an accuracy from 0 to 1, such as 0.5 for 50 %"
            )
    settings = [run.config.run for each in found for run in each.runs]
    configured = [target for run in settings for target in (*run.targets, run.target) if target is not None]
    return tuple(sorted(set(given or configured)))


def run_statistics(run: RecordedRun, targets: Sequence[float]) -> RunStatistics:
    """The statistics of a run: parameters, multiply-adds and clock of the last round, bytes of all rounds."""
    last = run.records[-1]
    cost: dict[str, Any] = {
        name: sum(record[name] for record in run.records) if name.startswith("bytes") else last[name]
        for name in COSTS
    }
    return RunStatistics(
        path=str(run.path),
        seed=run.seed,
        rounds=len(run.records),
        rounds_configured=run.config.train.rounds,
        finished=run.finished,
        evaluations=len(evaluated(run.records)),
        accuracy=dict(run.accuracy),
        targets={str(target): reached(run.records, target) for target in targets},
        cost=cost,
    )


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and s = √(Σ(x - mean)² / (n - 1)) of the values that are not None.

    >>> spread([0.25, 0.75, 0.5]), spread([7]), spread([None])
    (Spread(mean=0.5, std=0.25, n=3), Spread(mean=7, std=None, n=1), None)
    """
    known = [value for value in values if value is not None]
    return _spread(known) if known else None


def _spread(known: Sequence[float]) -> Spread:
    return Spread(mean(known), stdev(known) if len(known) > 1 else None, len(known))


def time_to_target(runs: Sequence[RunStatistics], target: float) -> TimeToTarget:
    """The number of seeds that reached a target, and their clock if all did."""
    clocks = [point["clock"] for run in runs if (point := run.targets[str(target)]) is not None]
    return TimeToTarget(target, len(clocks), len(runs), _spread(clocks) if len(clocks) == len(runs) else None)


def _with_ratio(own: TimeToTarget, base: TimeToTarget) -> TimeToTarget:
    if own.clock is None or base.clock is None:
        return own
    return replace(own, ratio=own.clock.mean / base.clock.mean)


def paired_difference(own: Mapping[int, float], base: Mapping[int, float]) -> Difference:
    """The paired t-test of two accuracies by seed: with the differences d of the n common seeds,
    t = mean(d) / (s(d) / √n), two-sided p and interval from Student's t with n - 1 degrees of freedom.

    If all differences are equal, s(d) = 0 and the limits are returned: p = 0 and an interval of one point, or
    p = 1 if the difference is zero; `constant` is then set.

    >>> paired_difference({1: 0.75, 2: 0.5}, {1: 0.5, 2: 0.25, 3: 0.5})
    Difference(seeds=(1, 2), mean=0.25, low=0.25, high=0.25, p=0.0, holm=None, constant=True)
    """
    seeds = tuple(sorted(own.keys() & base.keys()))
    if len(seeds) < 2:
        return Difference(seeds)
    differences = [own[seed] - base[seed] for seed in seeds]
    average = fmean(differences)
    if max(differences) - min(differences) <= ROUNDING:
        if abs(average) <= ROUNDING:
            return Difference(seeds, 0.0, 0.0, 0.0, p=1.0, constant=True)
        return Difference(seeds, average, average, average, p=0.0, constant=True)
    from scipy.stats import ttest_rel  # takes a second to import

    test = ttest_rel([own[seed] for seed in seeds], [base[seed] for seed in seeds])
    low, high = test.confidence_interval(LEVEL)
    return Difference(seeds, average, float(low), float(high), p=float(test.pvalue))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjustment of m p values: the i-th smallest becomes max over j ≤ i of (m - j + 1) · p_(j), at
    most 1. It controls the probability of any false positive.

    >>> holm([0.25, 0.0625, 0.125])
    [0.25, 0.1875, 0.25]
    """
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = highest
    return adjusted


def _tests(
    figures: Mapping[str, Sequence[RunStatistics]], base: str, measure: AccuracyMeasure
) -> dict[str, Difference]:
    """The paired test of every series but the base, with Holm's adjustment."""
    values = {
        label: {run.seed: value for run in runs if (value := run.accuracy[measure]) is not None}
        for label, runs in figures.items()
    }
    found = {label: paired_difference(own, values[base]) for label, own in values.items() if label != base}
    raw = {label: each.p for label, each in found.items() if each.p is not None}
    adjusted = dict(zip(raw, holm(list(raw.values())), strict=True))
    return {label: replace(each, holm=adjusted.get(label)) for label, each in found.items()}
