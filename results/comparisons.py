"""Tables of the comparison on CIFAR: accuracies, costs and differences between methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from finished import MAIN, ROUNDS, TARGETS, chosen, main_methods, name, of_paper

from feddumap.report.comparison import in_bytes, in_percent, in_seconds, in_units, p_value
from feddumap.report.series import RecordedRun, Series
from feddumap.report.statistics import (
    Difference,
    RunStatistics,
    compare,
    run_statistics,
    spread,
    time_to_target,
)
from feddumap.runs.summary import reached
from feddumap.system.console import metric

ALONE = "τ = 1, transfer_on_clock = True, shared_samples = 100"  # what FedDUMAP-CS adds
HEADLINE = {
    "`fedavg`": "FedAvg",
    "`feddumap`": "FedDUMAP, the paper's",
    "`feddumap-c`": "FedDUMAP-C",
    "`feddumap-cs`": "FedDUMAP-CS",
    f"`data-sharing` ({ALONE})": "data-sharing with 100 images, τ = 1",
}
SEED = 777  # of the baselines


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def accuracy(runs: Sequence[RunStatistics], kind: str) -> str:
    """An accuracy in percent over seeds."""
    value = spread([run.accuracy[kind] for run in runs])
    return in_percent(value) if value else "-"


def comparison(data: str, model: str) -> str:
    """Accuracies, and rounds and time to the paper's target, beside the paper's numbers."""
    target = TARGETS[data, model]
    lines = []
    for each in main_methods(data, model):
        runs = [run_statistics(run, [target]) for run in each.runs]
        points = [point["round"] + 1 for run in runs if (point := run.targets[str(target)])]
        lines.append(
            [
                *(name(each), str(len(runs)), of_paper(each, "accuracy", ".1%").rstrip("%")),
                *(accuracy(runs, kind) for kind in ("best_smoothed", "mean10", "validated")),
                f"{sum(points) / len(points):.0f}" if len(points) == len(runs) else "-",
                *(of_paper(each, "time", ",.0f"), seconds_to(target, runs)),
            ]
        )
    percent = f"{100 * target:g} %"
    head = ["method", "seeds", "paper (%)", "best smoothed (%)", "last 10 (%)", "held-out choice (%)"]
    head += [f"rounds to {percent}", f"paper: time to {percent} (s)", f"time to {percent} (s)"]
    return markdown(head, lines)


def seconds_to(target: float, runs: Sequence[RunStatistics]) -> str:
    """The virtual time to a target, or how many seeds reach it."""
    reach = time_to_target(runs, target)
    some = f"{reach.reached} of {reach.seeds} seeds" if reach.reached else "never"
    return in_seconds(reach.clock) if reach.clock else some


def baselines(data: str, model: str) -> str:
    """Accuracy and cost of the methods that FedDUMAP is compared with, beside it and FedAvg; one seed."""
    target = TARGETS[data, model]
    plain = [f"`{method}`" for method in ("fedavg", "feddumap", "feddumap-c", "feddumap-cs")]
    lines = []
    for each in chosen(data, model, rounds=None, folders=("grid",)):
        if each.config.method.name in MAIN and name(each) not in plain:
            continue
        rounds = each.config.train.rounds
        shown = name(each) if rounds == ROUNDS else f"{name(each)}, {rounds} rounds"
        for run in (run_statistics(run, [target]) for run in each.runs if run.seed == SEED):
            cost = run.cost
            lines.append(
                [
                    *(shown, of_paper(each, "accuracy", ".1%").rstrip("%")),
                    *(accuracy([run], kind) for kind in ("best_smoothed", "mean10", "validated")),
                    *(of_paper(each, "time", ",.0f"), seconds_to(target, [run]), f"{cost['clock']:,.0f}"),
                    *(metric(cost["macs"]), metric(cost["parameters"])),
                    metric(cost["bytes_down"] + cost["bytes_up"], "B"),
                ]
            )
    percent = f"{100 * target:g} %"
    head = ["method", "paper (%)", "best smoothed (%)", "last 10 (%)", "held-out choice (%)"]
    head += [f"paper: time to {percent} (s)", f"time to {percent} (s)", "time (s)"]
    return markdown([*head, "MACs", "parameters", "sent in all"], lines)


def headline(data: str, model: str) -> str:
    """Accuracy, and virtual time and bytes to the paper's target, of a few methods."""
    target = TARGETS[data, model]
    lines = []
    for each in (each for each in chosen(data, model) if name(each) in HEADLINE):
        runs = [run_statistics(run, [target]) for run in each.runs]
        reach = time_to_target(runs, target)
        sent = [
            sum(
                record["bytes_down"] + record["bytes_up"] for record in run.records[: int(point["round"]) + 1]
            )
            for run in each.runs
            if (point := reached(run.records, target)) is not None
        ]
        if reach.clock is not None and (carried := spread(sent)):
            to_target = [in_seconds(reach.clock), in_bytes(carried)]
        else:
            to_target = [f"{reach.reached} of {reach.seeds} seeds reach it", "-"]
        macs = spread([run.cost["macs"] for run in runs])
        shown = [HEADLINE[name(each)], str(len(runs)), accuracy(runs, "mean10"), *to_target]
        lines.append([*shown, in_units(macs) if macs else "-"])
    percent = f"{100 * target:g} %"
    head = ["method", "seeds", "accuracy (%)", f"virtual time to {percent} (s)", f"sent until {percent}"]
    return markdown([*head, "multiply-adds"], lines)


def costs(data: str, model: str) -> str:
    """Multiply-adds, parameters, bytes and virtual time of a whole run, beside the paper's multiply-adds."""
    lines = []
    for each in main_methods(data, model):
        runs = [run_statistics(run, []) for run in each.runs]
        macs, parameters = (spread([run.cost[key] for run in runs]) for key in ("macs", "parameters"))
        total = spread([run.cost["bytes_down"] + run.cost["bytes_up"] for run in runs])
        clock = spread([run.cost["clock"] for run in runs])
        assert macs is not None and parameters is not None and total is not None and clock is not None  # noqa: PT018
        shown = of_paper(each, "mflops", "g"), in_units(macs), in_units(parameters)
        lines.append([name(each), *shown, in_bytes(total), in_seconds(clock)])
    return markdown(["method", "paper: MACs (M)", "MACs", "parameters", "sent in all", "time (s)"], lines)


def differences(data: str, model: str) -> str:
    """The difference to FedAvg in the mean of the last ten rounds, paired over seeds."""
    found = [each for each in chosen(data, model) if len(each.runs) > 1]
    base = next((each for each in found if name(each) == "`fedavg`"), None)
    if base is None:
        return "Not before there are two seeds of FedAvg."
    lines = []
    for row, each in zip(compare(found, [], base.label).rows, found, strict=True):
        if (d := row.difference) is not None and d.mean is not None:
            seeds = ", ".join(map(str, d.seeds))
            sooner = times_sooner(each, base, TARGETS[data, model])
            lines.append([name(each), seeds, *points(d), p_value(d.holm), sooner])
    head = ["method", "seeds", "points above FedAvg", "95 % interval", "p", "p (Holm)"]
    return markdown([*head, "times sooner at the target, by seed"], lines)


def course(data: str, model: str) -> str:
    """Test accuracies on the way: means of the ten rounds up to a round, over seeds."""
    ends = (25, 50, 75, 100, 200, 300, ROUNDS)
    lines = []
    for each in main_methods(data, model):
        found = [spread([ten(run, end) for run in each.runs]) for end in ends]
        lines.append([name(each), *(in_percent(value) for value in found if value)])
    return markdown(["rounds", *map(str, ends)], lines)


def against_alone() -> str:
    """FedDUMAP-CS less calibration and shared images alone, means of ten rounds over common seeds."""
    ends = (25, 50, 100, 200, ROUNDS)
    lines = []
    for model, shown in (("lenet", "LeNet5"), ("cnn", "CNN")):
        found = {name(each): each for each in chosen("cifar10", model)}
        own, alone = (found[key] for key in ("`feddumap-cs`", f"`data-sharing` ({ALONE})"))
        early = [fmean(ten(a, end) - ten(b, end) for a, b in common(own, alone)) for end in ends]
        d = compare([own, alone], [], alone.label).rows[0].difference
        assert d is not None
        measures = [*(f"{100 * value:+.1f}" for value in early), *points(d)[1:]]
        sooner = times_sooner(own, alone, TARGETS["cifar10", model])
        lines.append([shown, ", ".join(map(str, d.seeds)), *measures, sooner])
    head = ["network", "seeds", *(f"round {end}" for end in ends), "95 % interval", "p"]
    return markdown([*head, "times sooner at the target, by seed"], lines)


def common(own: Series, base: Series) -> list[tuple[RecordedRun, RecordedRun]]:
    """The runs of two series with the same seed."""
    other = {run.seed: run for run in base.runs}
    return [(run, other[run.seed]) for run in own.runs if run.seed in other]


def points(d: Difference) -> list[str]:
    """A difference in points, its interval and its p; dashes for a single seed."""
    if d.mean is None or d.low is None or d.high is None:
        return ["-"] * 3
    return [f"{100 * d.mean:+.1f}", f"{100 * d.low:+.1f} to {100 * d.high:+.1f}", p_value(d.p)]


def ten(run: RecordedRun, end: int) -> float:
    """The mean test accuracy of the ten rounds up to a round."""
    return fmean(record["accuracy"] for record in run.records[end - 10 : end])


def times_sooner(own: Series, base: Series, target: float) -> str:
    """For each common seed, the base's time to a target in units of the own one. Where one of them never
    reaches it, the time of its whole run is taken, and the ratio is a bound."""
    return ", ".join(ratio(a, b, target) for a, b in common(own, base))


def ratio(own: RecordedRun, base: RecordedRun, target: float) -> str:
    """The base's time to a target in units of the own one."""
    point, other = reached(own.records, target), reached(base.records, target)
    if point is None and other is None:
        return "neither"
    bound = "< " if point is None else "> " if other is None else ""
    needed = (other or base.records[-1])["clock"] / (point or own.records[-1])["clock"]
    return f"{bound}{needed:.1f}"
