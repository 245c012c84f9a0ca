"""Writes the tables of docs/results.md, docs/variants.md and the README from the runs in results/runs.

    python results/tables.py            # rewrites the blocks between <!-- table: NAME --> and <!-- end -->
    python results/tables.py --check    # exits with 1 if a document differs from the runs

The paper's numbers are those of `feddumap paper`. A mean is followed by the standard deviation over seeds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean

from finished import (
    GRIDS,
    MAIN,
    RESULTS,
    ROUNDS,
    TARGETS,
    chosen,
    main_methods,
    name,
    of_paper,
    paper_ablation,
    series,
)

from feddumap.report.comparison import in_bytes, in_percent, in_seconds, in_units, p_value
from feddumap.report.statistics import RunStatistics, compare, run_statistics, spread, time_to_target
from feddumap.runs.summary import reached
from feddumap.sweep.grid import combinations, name_from_values, read
from feddumap.system.console import metric

DOCUMENTS = tuple(RESULTS.parent / path for path in ("docs/results.md", "docs/variants.md", "README.md"))
ALONE = "τ = 1, transfer_on_clock = True, shared_samples = 100"  # what FedDUMAP-CS adds
HEADLINE = {
    "`fedavg`": "FedAvg",
    "`feddumap`": "FedDUMAP, the paper's",
    "`feddumap-c`": "FedDUMAP-C",
    "`feddumap-cs`": "FedDUMAP-CS",
    f"`data-sharing` ({ALONE})": "calibration and shared images alone",
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
            sum(record["bytes_down"] + record["bytes_up"] for record in run.records[: point["round"] + 1])
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
    base = next((each.label for each in found if name(each) == "`fedavg`"), None)
    if base is None or len(found) < 2:
        return "(needs FedAvg and another method with at least two seeds)"
    lines = []
    for row, each in zip(compare(found, [TARGETS[data, model]], base).rows, found, strict=True):
        if (d := row.difference) is None or d.mean is None or d.low is None or d.high is None:
            continue
        interval = f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"
        ratio = f"{1 / row.times[0].ratio:.1f} times" if row.times[0].ratio else "-"
        shown = f"{100 * d.mean:+.1f}", interval, p_value(d.p), p_value(d.holm), ratio
        lines.append([name(each), ", ".join(map(str, d.seeds)), *shown])
    head = [
        "method",
        "seeds",
        "points above FedAvg",
        "95 % interval",
        "p",
        "p (Holm)",
        "sooner at the target",
    ]
    return markdown(head, lines)


def digits(folder: str) -> str:
    """Accuracies on the digits by what the runs of a folder differ in."""
    lines = []
    for each in series(folder):
        config, runs = each.config, [run_statistics(run, []) for run in each.runs]
        settings = config.method.settings
        keys = {
            "method": f"`{config.method.name}`",
            "shards a device": str(config.data.shards_per_device),
            "`degree`": str(settings.get("degree", "-")),
            "C": str(settings.get("c", "-")),
            "shared samples": str(settings.get("shared_samples", "-")),
            "τ": f"{config.train.calibration or 0:g}",
        }
        measures = {
            "seeds": str(len(runs)),
            "best smoothed (%)": accuracy(runs, "best_smoothed"),
            "last 10 (%)": accuracy(runs, "mean10"),
        }
        lines.append((keys, measures))
    lines.sort(key=lambda line: list(line[0].values()))
    first = lines[0][0]
    shown = [key for key in first if key == "method" or any(keys[key] != first[key] for keys, _ in lines)]
    rows = [[*(keys[key] for key in shown), *measures.values()] for keys, measures in lines]
    return markdown([*shown, *lines[0][1]], rows)


def trials(folder: str) -> str:
    """The last ten rounds on the server's held-out images, among its classes, and on the test images."""
    lines = []
    for each in series(folder):
        rounds = each.config.train.rounds
        last = [run.records[-10:] for run in each.runs]
        within = spread([fmean(record["validation"]["within"] for record in records) for records in last])
        test = spread([fmean(record["accuracy"] for record in records) for records in last])
        assert within is not None
        assert test is not None
        shown = [name(each), str(rounds), str(len(each.runs)), in_percent(within), in_percent(test)]
        lines.append((rounds, shown))
    head = ["method", "rounds", "seeds", "held-out, within the server's classes (%)", "test (%)"]
    return markdown(head, [shown for _, shown in sorted(lines)])


def ablations() -> str:
    """Early and late accuracy of the server update's variants, one seed each."""
    target = 0.4
    lines = []
    cells = combinations(read(RESULTS / "ablations.toml"))
    applied = {name_from_values(values): values for values, _ in cells}
    for each in series("ablations"):
        (recorded,) = each.runs
        run = run_statistics(recorded, [target])
        early = fmean(record["accuracy"] for record in recorded.records[40:50])
        point = run.targets[str(target)]
        lines.append(
            [
                *(name(each), paper_ablation(applied[recorded.path.name]), f"{100 * early:.2f}"),
                *(accuracy([run], kind) for kind in ("best_smoothed", "mean10")),
                str(point["round"] + 1) if point else "never",
            ]
        )
    head = ["method", "paper, CNN (%)", "rounds 41 to 50 (%)", "best smoothed (%)", "last 10 (%)"]
    return markdown([*head, f"rounds to {100 * target:g} %"], lines)


def large_networks() -> str:
    """A few rounds of VGG11 and ResNet18. Seconds are those of rounds that neither prune nor evaluate."""
    lines = []
    for each in (each for each in series() if each.config.model.name in ("vgg11", "resnet18")):
        records = each.runs[0].records
        first, last = records[0], records[-1]
        sizes = [metric(record[key]) for key in ("macs", "parameters") for record in (first, last)]
        walls = [0.0, *(record["wall"] for record in records)]
        taken = [(record, walls[i + 1] - walls[i]) for i, record in enumerate(records)]
        plain = [(r, time) for r, time in taken if "pruning" not in r and r["accuracy"] is None]
        before, after = (
            fmean(time for r, time in plain if r["macs"] == end["macs"]) for end in (first, last)
        )
        pruning = sum(time - after for r, time in taken if "pruning" in r)
        lines.append([each.config.model.name, *sizes, *(f"{time:.0f}" for time in (before, after, pruning))])
    head = ["model", "MACs before", "after", "parameters before", "after", "seconds a round before", "after"]
    return markdown([*head, "seconds of pruning"], lines)


def missing() -> str:
    """What is finished of the grids and how long it took, run after run, and what is not finished."""
    walls = {run.path: run.records[-1]["wall"] for each in series() for run in each.runs}
    lines = []
    for grid in GRIDS:
        names = [name_from_values(applied) for applied, _ in combinations(read(RESULTS / f"{grid}.toml"))]
        folders = [RESULTS / "runs" / grid / name for name in names]
        done = [walls[path] for path in folders if path in walls]
        time = f" in {sum(done) / 3600:.1f} hours" if done else ""
        left = ", ".join(f"`{path.name}`" for path in folders if path not in walls)
        not_yet = f"; not yet: {left}" if left else ""
        lines.append(f"- `results/{grid}.toml`: {len(done)} of {len(names)} finished{time}{not_yet}")
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "headline-lenet": partial(headline, "cifar10", "lenet"),
    "headline-cnn": partial(headline, "cifar10", "cnn"),
    "cifar10-lenet": partial(comparison, "cifar10", "lenet"),
    "cifar10-lenet-baselines": partial(baselines, "cifar10", "lenet"),
    "cifar10-lenet-costs": partial(costs, "cifar10", "lenet"),
    "cifar10-lenet-differences": partial(differences, "cifar10", "lenet"),
    "cifar10-cnn": partial(comparison, "cifar10", "cnn"),
    "cifar10-cnn-costs": partial(costs, "cifar10", "cnn"),
    "cifar10-cnn-differences": partial(differences, "cifar10", "cnn"),
    "cifar100-lenet": partial(comparison, "cifar100", "lenet"),
    "cifar100-cnn": partial(comparison, "cifar100", "cnn"),
    "ablations": ablations,
    "large-networks": large_networks,
    "full-participation": partial(digits, "full-participation"),
    "classes-per-device": partial(digits, "classes-per-device"),
    "shared-samples": partial(digits, "shared-samples"),
    "variant": partial(trials, "variant"),
    "missing": missing,
}


def filled(text: str) -> str:
    """The document with its tables written anew."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{BLOCKS[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->.*?<!-- end -->", block, text, flags=re.DOTALL)


def main() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        new = filled(text)
        if "--check" in sys.argv and new != text:
            sys.exit(f"{document} differs from the runs: run python results/tables.py")
        document.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
