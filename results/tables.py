"""Writes the tables of docs/results.md and of the README from the finished runs in results/runs.

    python results/tables.py            # rewrites the blocks between <!-- table: NAME --> and <!-- end -->
    python results/tables.py --check    # exits with 1 if a document differs from the runs

The paper's numbers are those of `feddumap paper`. A mean is followed by the standard deviation over seeds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from feddumap.config import Config, MethodConfig
from feddumap.methods.registry import RECIPES, compose, resolve
from feddumap.paper.item import find_item
from feddumap.report.comparison import in_bytes, in_percent, in_seconds, in_units, p_value
from feddumap.report.series import Series, find_runs, group_runs
from feddumap.report.statistics import RunStatistics, compare, run_statistics, spread, time_to_target
from feddumap.runs.reader import read_records
from feddumap.runs.summary import finished, reached
from feddumap.sweep.grid import combinations, name_from_values, read
from feddumap.system.console import metric

RESULTS = Path(__file__).parent
DOCUMENTS = (RESULTS.parent / "docs" / "results.md", RESULTS.parent / "README.md")
GRIDS = ("grid", "large", "ablations", "cifar100")
ITEMS = [f"table-{kind}-{data}" for data in ("cifar10", "cifar100") for kind in ("feddumap", "ablation")]
HEADLINE = {
    "`fedavg`": "FedAvg",
    "`feddumap`": "FedDUMAP, the paper's",
    "`feddumap-c`": "FedDUMAP-C",
    "`feddumap-cs`": "FedDUMAP-CS",
    "`fedavg` (τ = 0.5)": "FedAvg with `train.calibration=0.5`",
}
TARGETS = {  # the paper's
    ("cifar10", "lenet"): 0.5,
    ("cifar10", "cnn"): 0.6,
    ("cifar100", "lenet"): 0.2,
    ("cifar100", "cnn"): 0.3,
}


@cache
def series(*folders: str) -> list[Series]:
    """The finished runs of folders, grouped over seeds, in the order of the table of methods."""
    paths = [path for folder in folders or GRIDS if (path := RESULTS / "runs" / folder).is_dir()]
    runs = [run for run in find_runs(paths) if run.finished]
    order = list(RECIPES)
    return sorted(group_runs(runs), key=lambda each: (order.index(each.config.method.name), name(each)))


def name(each: Series) -> str:
    """The method, and the keys in which a series differs from its defaults and from the paper's setting."""
    config = each.config
    usual = Config.parse({"data": {"name": config.data.name}, "model": {"name": config.model.name}})
    defaults = resolve(MethodConfig(name=config.method.name)).settings
    tau = config.train.calibration
    keys = [f"τ = {tau:g}"] if tau is not None and tau != compose(config).calibration else []
    keys += [
        f"{key} = {value}" for key, value in config.method.settings.items() if defaults.get(key) != value
    ]
    keys += [
        f"{key} = {value}"
        for key in ("lr_decay", "epochs", "cohort")
        if (value := getattr(config.train, key)) != getattr(usual.train, key)
    ]
    if config.data.partition != usual.data.partition:
        keys.append({"iid": "IID"}.get(config.data.partition, config.data.partition))
    if config.data.server_fraction != usual.data.server_fraction:
        keys.append(f"p = {100 * config.data.server_fraction:g} %")
    if config.data.server_classes not in (None, 5, 50):
        keys.append(f"{config.data.server_classes} server classes")
    return f"`{config.method.name}`" + (f" ({', '.join(keys)})" if keys else "")


@cache
def paper_numbers() -> dict[tuple[str, ...], dict[str, float]]:
    """The paper's accuracy, time and MFLOPs by data set, model and method."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for item in map(find_item, ITEMS):
        for row in (row for table in item.numbers for row in table.dicts()):
            key = item.tables["data"]["name"], row["model.name"], row["method.name"]
            found.setdefault(key, row)
    return found


def of_paper(each: Series, key: str, form: str) -> str:
    """A number of the paper; a dash where it has none, or where a series differs from its setting."""
    config = each.config
    row = paper_numbers().get((config.data.name, config.model.name, config.method.name), {})
    if key not in row or "(" in name(each):
        return "-"
    return "never" if row[key] != row[key] else format(row[key], form)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def chosen(data: str, model: str, rounds: int = 500) -> list[Series]:
    """The series with this data set, model and number of rounds."""
    wanted = data, model, rounds
    return [
        each
        for each in series()
        if (each.config.data.name, each.config.model.name, each.config.train.rounds) == wanted
    ]


def accuracy(runs: Sequence[RunStatistics], kind: str) -> str:
    """An accuracy in percent over seeds."""
    value = spread([run.accuracy[kind] for run in runs])
    return in_percent(value) if value else "-"


def comparison(data: str, model: str, rounds: int = 500) -> str:
    """Accuracies, and rounds and time to the paper's target, beside the paper's numbers."""
    target = TARGETS[data, model]
    lines = []
    for each in chosen(data, model, rounds):
        runs = [run_statistics(run, [target]) for run in each.runs]
        reach = time_to_target(runs, target)
        points = [point["round"] + 1 for run in runs if (point := run.targets[str(target)])]
        some = f"{reach.reached} of {reach.seeds} seeds" if reach.reached else "never"
        lines.append(
            [
                *(name(each), str(len(runs)), of_paper(each, "accuracy", ".1%").rstrip("%")),
                *(accuracy(runs, kind) for kind in ("best_smoothed", "mean10", "validated")),
                f"{sum(points) / len(points):.0f}" if reach.clock else "-",
                *(of_paper(each, "time", ",.0f"), in_seconds(reach.clock) if reach.clock else some),
            ]
        )
    percent = f"{100 * target:g} %"
    head = ["method", "seeds", "paper (%)", "best smoothed (%)", "last 10 (%)", "held-out choice (%)"]
    head += [f"rounds to {percent}", f"paper: time to {percent} (s)", f"time to {percent} (s)"]
    return markdown(head, lines)


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
    for each in chosen(data, model):
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


def large_networks() -> str:
    """A few rounds of VGG11 and ResNet18."""
    lines = []
    for each in (each for each in series() if each.config.model.name in ("vgg11", "resnet18")):
        records = each.runs[0].records
        first, last = records[0], records[-1]
        sizes = [metric(record[key]) for key in ("macs", "parameters") for record in (first, last)]
        lines.append(
            [each.config.model.name, str(len(records)), *sizes, f"{last['wall'] / len(records):.0f}"]
        )
    head = ["model", "rounds", "MACs before", "after", "parameters before", "after", "seconds a round"]
    return markdown(head, lines)


def missing() -> str:
    """What is finished of the grids and how long it took, run after run, and what is not finished."""
    lines = []
    for grid in GRIDS:
        names = [name_from_values(applied) for applied, _ in combinations(read(RESULTS / f"{grid}.toml"))]
        folders = [RESULTS / "runs" / grid / name for name in names]
        left = [path for path in folders if not (path.is_dir() and finished(path))]
        done = [path for path in folders if path not in left]
        hours = sum(read_records(path)[-1]["wall"] for path in done) / 3600
        time = f" in {hours:.1f} hours" if done else ""
        not_yet = f"; not yet: {', '.join(f'`{path.name}`' for path in left)}" if left else ""
        lines.append(f"- `results/{grid}.toml`: {len(done)} of {len(names)} finished{time}{not_yet}")
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "headline-lenet": partial(headline, "cifar10", "lenet"),
    "cifar10-lenet": partial(comparison, "cifar10", "lenet"),
    "cifar10-lenet-costs": partial(costs, "cifar10", "lenet"),
    "cifar10-lenet-differences": partial(differences, "cifar10", "lenet"),
    "cifar10-cnn": partial(comparison, "cifar10", "cnn"),
    "cifar10-cnn-costs": partial(costs, "cifar10", "cnn"),
    "cifar100-lenet": partial(comparison, "cifar100", "lenet"),
    "ablations": partial(comparison, "cifar10", "lenet", 200),
    "large-networks": large_networks,
    "full-participation": partial(digits, "full-participation"),
    "classes-per-device": partial(digits, "classes-per-device"),
    "shared-samples": partial(digits, "shared-samples"),
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
