"""Tables of ablations, of the variants' trials, of the large networks, and of what is not finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from comparisons import SEED, accuracy, markdown, ten
from finished import GRIDS, RESULTS, TRIALS, chosen, name, paper_ablation, paper_numbers, series

from feddumap.report.comparison import in_percent
from feddumap.report.series import Series
from feddumap.report.statistics import run_statistics, spread
from feddumap.sweep.grid import combinations, name_from_values, read
from feddumap.system.console import metric


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
    """The last ten rounds on the test images, and on the server's held-out images among its classes."""
    found = series(folder)
    held_out = all(each.config.data.validation for each in found)
    lines = []
    for each in found:
        last = [run.records[-10:] for run in each.runs]
        rounds = each.config.train.rounds
        shown = [name(each), str(rounds), str(len(each.runs))]
        if held_out:
            within = [fmean(record["validation"]["within"] for record in records) for records in last]
            shown.append(percent(within))
        shown.append(percent([fmean(record["accuracy"] for record in records) for records in last]))
        lines.append((rounds, shown))
    column = ["held-out, within the server's classes (%)"] if held_out else []
    head = ["method", "rounds", "seeds", *column, "test (%)"]
    return markdown(head, [shown for _, shown in sorted(lines)])


def percent(accuracies: Sequence[float]) -> str:
    """Accuracies over seeds."""
    value = spread(accuracies)
    assert value is not None
    return in_percent(value)


def ablations() -> str:
    """Early and late accuracy of the server update's variants, one seed each."""
    target = 0.4
    lines = []
    cells = combinations(read(RESULTS / "ablations.toml"))
    paper = {name_from_values(values): paper_ablation(values) for values, _ in cells}
    of_fedavg = f"{100 * paper_numbers()['cifar10', 'cnn', 'fedavg']['accuracy']:.1f}"
    for each in [*series("ablations"), fedavg()]:
        (recorded,) = each.runs
        run = run_statistics(recorded, [target])
        point = run.targets[str(target)]
        accuracies = [f"{100 * ten(recorded, 50):.2f}"]
        accuracies += [accuracy([run], kind) for kind in ("best_smoothed", "mean10")]
        rounds = str(point["round"] + 1) if point else "never"
        lines.append([name(each), paper.get(recorded.path.name, of_fedavg), *accuracies, rounds])
    head = ["method", "paper, CNN (%)", "rounds 41 to 50 (%)", "best smoothed (%)", "last 10 (%)"]
    return markdown([*head, f"rounds to {100 * target:g} %"], lines)


def fedavg() -> Series:
    """FedAvg as far as the ablations go. It is not concerned by the server's data."""
    plain = next(each for each in chosen("cifar10", "lenet") if name(each) == "`fedavg`")
    run = next(run for run in plain.runs if run.seed == SEED)
    return replace(plain, runs=(replace(run, records=run.records[:200]),))


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
    lines = []
    for grid in (*GRIDS, *TRIALS):
        walls = {run.path: run.records[-1]["wall"] for each in series(grid) for run in each.runs}
        names = [name_from_values(applied) for applied, _ in combinations(read(RESULTS / f"{grid}.toml"))]
        folders = [RESULTS / "runs" / grid / name for name in names]
        done = [walls[path] for path in folders if path in walls]
        time = f" in {sum(done) / 3600:.1f} hours" if done else ""
        left = ", ".join(f"`{path.name}`" for path in folders if path not in walls)
        not_yet = f"; not yet: {left}" if left else ""
        lines.append(f"- `results/{grid}.toml`: {len(done)} of {len(names)} finished{time}{not_yet}")
    return "\n".join(lines)
