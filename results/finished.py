"""The finished runs in results/runs, what they are called, and the paper's numbers for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from feddumap.config import Config, MethodConfig
from feddumap.methods.registry import RECIPES, compose, resolve
from feddumap.paper.item import find_item
from feddumap.report.series import Series, find_runs, group_runs

RESULTS = Path(__file__).parent
GRIDS = ("grid", "large", "ablations", "cifar100")
TRIALS = ("variant", "cifar100-variant", "classes-per-device", "shared-samples", "full-participation")
ITEMS = [f"table-{kind}-{data}" for data in ("cifar10", "cifar100") for kind in ("feddumap", "ablation")]
ABLATIONS = [f"table-{kind}" for kind in ("effective-steps", "accuracy-weight", "c", "server-degree")]
ROUNDS = 500  # of the paper
MAIN = ("fedavg", "feddu", "feddum", "fedap", "fedduap", "feddumap", "feddumap-c", "feddumap-cs")
TARGETS = {  # the paper's
    (item.tables["data"]["name"], model): target
    for item in map(find_item, ITEMS)
    for model, target in item.targets.items()
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


def paper_ablation(applied: dict[str, Any]) -> str:
    """The paper's accuracy of FedDU on the CNN where its server update differs by these keys."""
    wanted = {"model.name": "cnn", "method.name": "feddu", "data.server_fraction": 0.1, **applied}
    rows = [row for item in map(find_item, ABLATIONS) for table in item.numbers for row in table.dicts()]
    return next(f"{row['accuracy']:.1%}".rstrip("%") for row in rows if wanted.items() <= row.items())


def chosen(data: str, model: str, rounds: int | None = ROUNDS, folders: tuple[str, ...] = ()) -> list[Series]:
    """The series with this data set and model, and this number of rounds if one is given."""
    return [
        each
        for each in series(*folders)
        if (each.config.data.name, each.config.model.name) == (data, model)
        and each.config.train.rounds == (rounds or each.config.train.rounds)
    ]


def main_methods(data: str, model: str) -> list[Series]:
    """The series of FedAvg, the paper's methods and this project's own."""
    return [each for each in chosen(data, model) if each.config.method.name in MAIN]
