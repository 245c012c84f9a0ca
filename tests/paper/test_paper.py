"""The paper's items: each is sound, its numbers and claims fit its runs, and items share runs."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from feddumap.cli import main as cli
from feddumap.errors import FeddumapError
from feddumap.methods.registry import RECIPES, resolve
from feddumap.paper.item import METRICS, Item, Reference, all_items, find_item, load
from feddumap.paper.labels import SYMBOLS
from feddumap.paper.results import (
    Finding,
    Measured,
    PaperRow,
    Results,
    evaluate_claim,
    relative_difference,
    select,
)
from feddumap.paper.run_names import cells, flat, name_from_configuration
from feddumap.paper.tables import document
from feddumap.report.statistics import RunStatistics
from feddumap.sweep.grid import combinations

ROOT = Path(__file__).parents[2]
ITEMS = all_items()
SMALL = [
    "data.name=digits",
    "data.devices=6",
    "train.cohort=3",
    "train.epochs=1",
    "train.batch=32",
    "run.workers=1",
]
NAMED = ("model.name", "method.name")
Command = Callable[..., tuple[int, str, str]]

each_item = pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Call `feddumap paper` in this process; returns exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["feddumap", "paper", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err

    return call


def planned(item: Item) -> list[Measured]:
    """The runs of an item before any is trained, without the data they need."""
    found = []
    for swept, config in combinations(item.grid([1])):
        whole = config.model_copy(update={"method": resolve(config.method)})
        found.append(Measured({key: swept[key] for key in swept if key != "run.seed"}, flat(whole), (), ()))
    return found


# what is shipped


def test_every_table_and_figure_of_the_evaluation_is_there() -> None:
    tables = [f"Table {number}" for number in range(2, 14)]  # 1: notation
    figures = [f"Figure {number}" for number in range(2, 15)]  # 1: the framework
    assert [item.number for item in ITEMS] == [*tables, *figures]
    assert len({item.label for item in ITEMS}) == len({item.name for item in ITEMS}) == 25
    for item in ITEMS:
        assert item.name.startswith(item.number.split()[0].lower())
        assert item.label.startswith({"T": "tab:", "F": "fig:"}[item.number[0]])
        assert bool(item.numbers) == item.number.startswith("Table")
        assert item.numbers or item.claims


def lines(item: Item) -> list[dict[str, Any]]:
    return [line for numbers in item.numbers for line in numbers.dicts()]


def test_the_numbers_are_all_there() -> None:
    """Models × rows × numbers of each table; three values of p, accuracy or accuracy, time and MFLOPs."""
    counts = {
        item.number: sum(key in METRICS for line in lines(item) for key in line)
        for item in ITEMS
        if item.numbers
    }
    assert counts == {
        "Table 2": 2 * (1 + 3 * (1 + 4)),
        "Table 3": 2 * (1 + 3 * 2),
        "Table 4": 2 * (1 + 3 * 3),
        "Table 5": 2 * (1 + 3 * 3),
        "Table 6": 4 * 3,
        "Table 7": 4 * 3,
        "Table 8": 2 * 4 * 3,
        "Table 9": 4 * 3,
        "Table 10": 3 * 11 * 3,
        "Table 11": 3 * 11 * 3,
        "Table 12": 3 * 6 * 3,
        "Table 13": 3 * 6 * 3,
    }


@each_item
def test_numbers_and_claims_are_about_its_runs(item: Item) -> None:
    found = planned(item)
    assert {each.values["method.name"] for each in found} <= set(RECIPES)
    named = [select(found, {key: line[key] for key in line if "." in key}) for line in lines(item)]
    assert [len(matching) for matching in named] == [1] * len(named), "a row is about one run"
    assert len({id(matching[0]) for matching in named}) == len(named)
    if named:
        assert len(named) == len(found), "a table has a row for every run"
    for line in lines(item):
        assert "time" not in line or line["model.name"] in item.targets
    for claim in item.claims:
        assert claim.quote
        for against in claim.over:
            number = against.says.split("%")[0].split()[0]
            assert number in claim.quote or (number == "1" and "one time" in claim.quote)
            assert all(key in SYMBOLS or key in NAMED for key in {**claim.of, **against.where})
            pairs = evaluate_claim(item, claim, against, [pretended(each, {}) for each in found])
            assert pairs.pairs, (item.name, claim.of, against.where)


@each_item
def test_its_rows_have_names_of_their_own(item: Item) -> None:
    """CSV has one row for each."""
    rows = [PaperRow(each.values["method.name"], {}, each, None) for each in planned(item)]
    findings = [Finding(claim, against, None, 0, None) for claim in item.claims for against in claim.over]
    tables = document(Results(item, tuple(rows), 0, tuple(findings)), (), grouped=False).tables
    texts = [cell.text for table in tables for cell in table.columns[0].cells]
    assert len(set(texts)) == len(texts) == len(rows) + len(findings)


@each_item
def test_it_is_the_papers_setting(item: Item) -> None:
    expected = {"data.devices": 100, "train.rounds": 500, "train.cohort": 10, "train.epochs": 5}
    expected |= {"train.batch": 10, "train.lr": 0.1, "train.lr_decay": 0.99, "clock.profile": "paper"}
    for each in planned(item):
        assert expected.items() <= each.values.items()
        assert each.values["data.name"] in ("cifar10", "cifar100")
        assert each.values.get("method.prune_round", 30) == 30
        if "data.server_fraction" not in each.swept:
            assert each.values["data.server_fraction"] == 0.1


# the text of the paper follows from its tables, with the formulas that are used for ours


def pretended(each: Measured, line: dict[str, Any]) -> Measured:
    """A run with the numbers of the paper, or where it has none with ones."""
    time = line.get("time", 1.0)
    reached = None if math.isnan(time) else {"clock": time}
    accuracy = dict.fromkeys(("final", "mean10", "best_smoothed"), line.get("accuracy", 1.0))
    cost = {"macs": line.get("mflops", 1.0), "parameters": 1.0, "clock": 1.0}
    targets = dict.fromkeys(("0.2", "0.25", "0.3", "0.4", "0.49", "0.5", "0.55", "0.6"), reached)
    run = RunStatistics("", 1, 500, 500, True, 500, accuracy, targets, cost)
    return Measured(each.swept, each.values, (), (run,))


UNLIKE = {  # said in the notes of the items
    ("table-fedap-cifar100", "8.2%"): 480 / 360 - 1,
    ("table-feddumap-cifar10", "41.3%"): 1 - 2.7 / 4.5,
    ("table-ablation-cifar100", "43.1%"): 355 / 202 - 1,
    ("table-ablation-cifar100", "0.2%"): 0.396 - 0.364,
}
NEAR = {"accuracy": 0.0006, "less compute": 0.01, "more compute": 0.01}  # of numbers with two or three digits


@pytest.mark.parametrize("item", [item for item in ITEMS if item.numbers], ids=lambda item: item.name)
def test_what_the_text_says_follows_from_the_table(item: Item) -> None:
    plain = planned(item)
    found = [
        pretended(*select(plain, {key: line[key] for key in line if "." in key}), line)
        for line in lines(item)
    ]
    for claim in item.claims:
        for against in claim.over:
            expected = UNLIKE.get((item.name, against.says), against.value)
            near = NEAR.get(claim.measure, 0.06 if "time" in against.says else 0.0006)
            assert evaluate_claim(item, claim, against, found).ours == pytest.approx(expected, abs=near), (
                claim.quote
            )


def test_slower_is_the_ratio_itself() -> None:
    """Table 10's times of Data-sharing and FedDU with CNN, and the text's 15.7 times."""
    one, other = (pretended(Measured({}, {}, (), ()), {"time": time, "mflops": 2.0}) for time in (4447, 284))
    assert relative_difference("slower", one, other, 0.6) == pytest.approx(15.7, abs=0.05)
    assert relative_difference("longer", one, other, None) == 0
    assert relative_difference("smaller", one, other, None) == 0
    assert relative_difference("faster", one, pretended(other, {"time": math.nan}), 0.6) is None
    assert relative_difference("faster", one, other, None) is None


# names


def test_items_share_runs_by_their_configuration(home: Path, tmp_path: Path) -> None:
    sets = [*SMALL, "model.name=lenet"]
    table, figure = (
        {cell.name: cell.config for cell in cells(find_item(name), tmp_path, [1, 2], sets)}
        for name in ("table-ablation-cifar10", "figure-feddum-cifar10")
    )
    common = {name.split("-", 2)[2].split("-data")[0]: name for name in table.keys() & figure.keys()}
    assert sorted(common) == ["fedavg", "feddu", "feddum"]
    assert all(table[name] == figure[name] for name in common.values())
    assert common["feddu"].endswith(("-1", "-2"))
    longer = cells(find_item("table-ablation-cifar10"), tmp_path, [1], [*sets, "train.rounds=2"])
    assert not {cell.name for cell in longer} & table.keys()


def test_a_name_is_the_configuration(home: Path, tmp_path: Path) -> None:
    def name(**sections: dict[str, Any]) -> str:
        from feddumap import run as api

        sections = {"data": {"name": "digits"}, "model": {"name": "lenet"}, **sections}
        return name_from_configuration({}, api.start(sections).config)

    assert name() == "digits-lenet-fedavg-777"
    assert name(run={"seed": 3, "workers": 2}) == "digits-lenet-fedavg-3"
    assert name(data={"name": "digits", "server_classes": 5}) == "digits-lenet-fedavg-777", "the default"
    assert name(method={"name": "feddu", "c": 1.0}) == "digits-lenet-feddu-777", "the default"
    assert name(method={"name": "feddu", "c": 0.5}) == "digits-lenet-feddu-method.c=0.5-777"
    assert name(train={"rounds": 2}) == "digits-lenet-fedavg-train.rounds=2-777"
    assert name(data={"name": "digits", "augment": False}) == "digits-lenet-fedavg-data.augment=false-777"
    odd = name(model={"name": "tests.support.own_model:make"}, clock={"train_seconds": 1.0})
    pattern = r"digits-tests\.support\.own_model_make-fedavg-clock\.train_seconds=1\.0-[0-9a-f]{8}-777"
    assert re.fullmatch(pattern, odd), "what a folder cannot be called has a checksum"


# the command


ARGUMENTS = ["--rounds", "2", "--jobs", "1", *(part for text in SMALL for part in ("--set", text))]


def test_an_item_is_trained_once_and_set_beside_the_paper(home: Path, paper: Command, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "runs"), "--set", "model.name=lenet", *ARGUMENTS]
    chosen = [*out, "--set", "method.name=feddu"]
    code, printed, _ = paper("table-ablation-cifar10", *chosen, "--dry-run")
    assert code == 0
    assert "1 cells: 1 new" in printed
    assert not (tmp_path / "runs").exists()

    code, printed, errors = paper("table-ablation-cifar10", *chosen, "--seeds", "2")
    assert code == 0, errors
    assert "Table 12 (tab:ablation): The final accuracy" in printed
    assert "LeNet on digits, time in seconds to 0.5" in printed
    (row,) = [line for line in printed.splitlines() if "FedDU " in line and "│" in line]
    shown = [part.strip() for part in row.split("│")[1:-1]]
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/summary.json")]
    assert len(summaries) == 2
    mean = sum(summary["accuracy"]["best_smoothed"] for summary in summaries) / 2
    assert shown[:2] == ["FedDU", "0.552"]
    assert shown[2].startswith(f"{mean:.3f}")
    assert shown[4] == "284"
    assert shown[6:] == ["0.7", "0.0"]  # the digits are smaller
    assert "Set for these runs: train.rounds=2, model.name=lenet, data.name=digits" in printed
    assert "17 rows of the paper are left out" in printed
    paths = sorted(str(path) for path in (tmp_path / "runs").iterdir())
    assert f"feddumap report {' '.join(paths)}" in errors
    assert f"feddumap compare {' '.join(paths)}" in errors

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    code, printed, _ = paper("figure-ablation-cifar10", *chosen, "--seeds", "2", "--json")
    value = json.loads(printed)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before, "shared"
    (line,) = value["rows"]
    assert line["ours"]["accuracy"]["mean"] == pytest.approx(mean)
    assert line["ours"]["accuracy"]["n"] == 2
    assert line["paper"] == {}
    assert [claim["ours"] for claim in value["claims"]] == [None, None], "nothing to compare with"


def test_a_claim_is_measured(home: Path, paper: Command, tmp_path: Path) -> None:
    item = ["figure-server-share", "--out", str(tmp_path), "--set", "model.name=lenet", *ARGUMENTS]
    code, printed, errors = paper(*item, "--json")
    assert code == 0, errors
    value = json.loads(printed)
    accuracy = {
        row["keys"].get("data.server_fraction"): row["ours"]["accuracy"]["mean"]
        for row in value["rows"]
        if row["name"] == "feddu"
    }
    (claim,) = value["claims"]
    assert (claim["paper"], claim["pairs"]) == (0.053, 1)
    assert claim["ours"] == pytest.approx(accuracy[0.1] - accuracy[0.01])
    starts = {"csv": "row,", "markdown": "**LeNet on digits**", "latex": "% LeNet on digits"}
    for form, start in starts.items():
        code, printed, _ = paper(*item, "--format", form)
        assert code == 0
        assert printed.startswith(start)
        if form == "csv":
            assert len(printed.splitlines()) == 1 + 4 + 1, "a row a run, and the claim"
        if form == "markdown":
            assert f"| {100 * claim['ours']:.1f} points |" in printed, "a difference of accuracies"


def test_the_list(paper: Command) -> None:
    code, printed, _ = paper("list")
    assert code == 0
    assert max(map(len, printed.splitlines())) <= 120
    code, as_json, _ = paper("--json")
    value = json.loads(as_json)
    assert [each["name"] for each in value] == [item.name for item in ITEMS]
    for item in ITEMS:
        assert f"│ {item.name} " in printed
    runs = {each["name"]: each["runs"] for each in value}
    assert (runs["table-effective-steps"], runs["table-feddumap-cifar10"]) == (2 * (1 + 3 * 5), 3 * 11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table-d"], "unknown item 'table-d': did you mean 'table-c'?"),
        (["list", "--rounds", "3"], "--rounds applies to one item"),
        (["table-c", "--seeds", "0"], "--seeds '0': expected a number of seeds"),
        (["table-c", "--seeds", "1,x"], "--seeds '1,x': expected a number of seeds"),
        (["table-c", "--set", "method.mu=0.1", "--set", "data.name=digits"], "unknown key method.mu"),
    ],
)
def test_mistakes(home: Path, paper: Command, arguments: list[str], message: str) -> None:
    code, printed, errors = paper(*arguments)
    assert (code, printed) == (2, "")
    assert message in errors


def test_a_bad_item(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('[item]\nnumber = "Table 2"\n')
    with pytest.raises(FeddumapError, match=r"bad.toml is not a valid item: label: Field required"):
        load(tmp_path / "bad.toml")
    with pytest.raises(ValueError, match="says"):
        Reference.model_validate({"method.name": "fedavg", "says": "a lot"})


def test_the_document_lists_every_item() -> None:
    text = (ROOT / "docs" / "paper.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9-]+)` \| (\w+ \d+), `([^`]+)` \|", text, re.MULTILINE)
    assert listed == [(item.name, item.number, item.label) for item in ITEMS]
