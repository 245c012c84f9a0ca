"""Grids: which cells there are, that each is an ordinary run, and that no end of any kind loses one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from feddumap import run as api
from feddumap.cli import main as cli
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError
from feddumap.methods.idle import NEVER, unreached
from feddumap.methods.registry import RECIPES, settings_model
from feddumap.runs.reader import read_checkpoint, read_config, read_records
from feddumap.sweep import jobs
from feddumap.sweep.grid import Cell, cells, cells_of, name_from_values, read
from feddumap.sweep.overhead import Overhead
from feddumap.sweep.status import CellState, read_state, time_left
from feddumap.system.console import metric
from tests.conftest import SMALL, small
from tests.support.runs import interrupted

ROOT = Path(__file__).parents[2]
Write = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def write(home: Path, tmp_path: Path) -> Write:
    """Write a grid of small runs: `write({"run.seed": [1, 2]}, method={...})`."""

    def make(grid: Any, **sections: dict[str, Any]) -> Path:
        value = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {**SMALL, **sections}}
        path = tmp_path / "small.toml"
        path.write_text(tomli_w.dumps({**value, "grid": grid}))
        return path

    return make


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Call `feddumap grid` in this process; returns exit code, output and errors."""

    def call(file: Path, *arguments: str) -> tuple[int, str, str]:
        command = ["feddumap", "grid", str(file), "--out", str(tmp_path / "out"), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err

    return call


def bits(directory: Path) -> tuple[str, float, list[dict[str, Any]]]:
    """Everything about a run that must not depend on how it got there."""
    saved = read_checkpoint(max(directory.glob("checkpoint-*.json")))
    records = [{**record, "wall": 0} for record in read_records(directory)]
    return digest(saved.state.weights), saved.state.clock, records


def names(found: list[Cell]) -> list[str]:
    return [cell.name for cell in found]


# which cells there are


def test_the_cells_are_the_product_in_order(write: Write, tmp_path: Path) -> None:
    file = write({"method.name": ["feddu", "fedavg"], "model.name": ["lenet", "cnn"], "run.seed": [2, 1]})
    found = cells(file, tmp_path / "out")
    expected = [f"{m}-{n}-{s}" for m in ("feddu", "fedavg") for n in ("lenet", "cnn") for s in (2, 1)]
    assert names(found) == expected
    for cell in found:
        config = cell.config
        assert cell.path == tmp_path / "out" / f"{config.method.name}-{config.model.name}-{config.run.seed}"
        assert config == api.start(config).config, "resolved, as its directory will have it"
        assert cell.rounds == 3


def test_the_users_of_a_data_set_are_the_devices_of_every_cell(write: Write, tmp_path: Path) -> None:
    """A number of devices that the file does not give is not taken as given."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (240, 8, 8, 1), dtype=np.uint8), np.arange(240) % 3
    train = {"train_inputs": images, "train_labels": labels, "train_users": np.arange(240) // 2}
    np.savez(tmp_path / "users.npz", **train, test_inputs=images[:9], test_labels=labels[:9])
    file = tmp_path / "users.toml"
    data = {"name": str(tmp_path / "users.npz"), "partition": "natural", "server_fraction": 0.0}
    grid = {"method.name": ["fedavg", "fedprox"], "run.seed": [1]}
    file.write_text(tomli_w.dumps({"data": data, "clock": {"profile": "general"}, "grid": grid}))
    assert [cell.config.data.devices for cell in cells(file, tmp_path / "out")] == [120, 120]


def test_keys_without_quotes_mean_the_same(write: Write, tmp_path: Path) -> None:
    nested = write({"method": {"name": ["feddu"], "c": [0.5, 1.0]}, "train": {"lr": [0.1]}})
    assert names(cells(nested, tmp_path)) == [
        "feddu-method.c=0.5-train.lr=0.1",
        "feddu-method.c=1.0-train.lr=0.1",
    ]


def test_a_key_that_a_method_lacks_is_left_out_and_duplicates_are_dropped(
    write: Write, tmp_path: Path
) -> None:
    file = write(
        {"method.name": ["fedavg", "feddu", "feddf"], "method.c": [0.5, 1.0], "run.seed": [7, 7]},
        method={"budget": "small"},
    )
    found = {cell.name: cell for cell in cells(file, tmp_path)}
    assert list(found) == ["fedavg-7", "feddu-method.c=0.5-7", "feddu-method.c=1.0-7", "feddf-7"]
    assert found["fedavg-7"].config.method.settings == {}
    assert found["feddu-method.c=0.5-7"].config.method.settings["c"] == 0.5
    assert "budget" not in found["feddu-method.c=0.5-7"].config.method.settings
    assert found["feddf-7"].config.method.settings["budget"] == "small"
    assert "method.c" not in found["feddf-7"].swept


def test_all_is_every_method(write: Write, tmp_path: Path) -> None:
    file = write({"method.name": "all"}, method={"budget": "small"})
    assert names(cells(file, tmp_path)) == list(RECIPES)


def test_names_are_safe_and_unique(write: Write, tmp_path: Path) -> None:
    found = cells(write({"clock.train_seconds": [1.5], "model.name": ["lenet"]}), tmp_path)
    assert names(found) == ["clock.train_seconds=1.5-lenet"]
    own = ["tests.support.own_model:make", "tests.support.own_model/make"]
    grid = read(write({"model.name": own}))
    assert [sweep.values for sweep in grid.sweeps] == [{"model.name": own}]
    assert grid.base.train.rounds == 3
    assert [name_from_values({"model.name": each}) for each in own] == ["tests.support.own_model_make"] * 2
    alike = cells_of(read(write({"run.seed": [1, 2]})), tmp_path, naming=lambda *_: "same")
    assert names(alike) == ["same", "same-2"]


def test_several_tables_are_several_products(write: Write, tmp_path: Path) -> None:
    file = write(
        [
            {"method.name": ["fedavg"], "run.seed": [1, 2]},
            {"method.name": ["feddu", "feddf"], "method.c": [0.5, 1.0], "run.seed": [1]},
            {"method.name": ["feddu"], "method.c": [1.0], "run.seed": [1]},
        ],
        method={"budget": "small"},
    )
    found = cells(file, tmp_path)
    both = ["feddu-method.c=0.5-1", "feddu-method.c=1.0-1"]
    assert names(found) == ["fedavg-1", "fedavg-2", *both, "feddf-1"]
    assert names(cells(file, tmp_path, ["method.name=feddu"])) == both, "tables that lack it are left out"
    assert names(cells(file, tmp_path, ["run.seed=2", "method.c=1"])) == ["fedavg-2"]
    assert names(cells(file, tmp_path, ["run.seed=9", "method.c=1"])) == [
        "fedavg-9",
        "feddu-method.c=1.0-9",
        "feddf-9",
    ]
    moved = cells(file, tmp_path, ["method.name=fedprox", "method.mu=0.5", "run.seed=1"])
    assert [(cell.name, cell.config.method.settings) for cell in moved] == [("fedprox-1", {"mu": 0.5})]


def test_a_setting_of_a_swept_key_keeps_that_value_alone(write: Write, tmp_path: Path) -> None:
    file = write({"method.name": ["feddu", "feddf"], "run.seed": [1, 2]}, method={"budget": "small"})
    found = cells(file, tmp_path, ["method.name=feddu", "train.rounds=2", "method.c=2.0"])
    assert names(found) == ["feddu-1", "feddu-2"]
    assert [(cell.rounds, cell.config.method.settings["c"]) for cell in found] == [(2, 2.0), (2, 2.0)]


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    ({"method.name": ["fedavg", "feddu"]}, {"method": {"cc": 1.0}}, "unknown key method.cc: did you mean"),
    ({"method.name": ["fedavg"], "method.c": [1.0]}, {}, "unknown key method.c: Keys of fedavg: none"),
    ({"method.name": ["fedavg", "feddo"]}, {}, "unknown method 'feddo': did you mean 'feddu'?"),
    ({"train.rouns": [1, 2]}, {}, "unknown key train.rouns: did you mean train.rounds?"),
    ({"trian.rounds": [1, 2]}, {}, "unknown section trian: did you mean train?"),
    ({"self.rounds": [1, 2]}, {}, "unknown section self"),
    ({"train.rounds": [2, "two"]}, {}, "train.rounds = 'two': input should be a valid integer"),
    ({"method.name": ["feddu"], "method.c": [1.0, "x"]}, {}, "cell feddu-method.c=x: method.c = 'x'"),
    ({"train.cohort": [3, 7]}, {}, "cell train.cohort=7: train.cohort = 7 is larger than data.devices = 6"),
    ({"model.name": ["lenet", "lenett"]}, {}, "cell lenett: unknown model 'lenett'"),
    ({"rounds": [1, 2]}, {}, "grid key 'rounds': expected section.key"),
    ({"run.seed": 3}, {}, "grid key run.seed = 3: expected a list of values"),
    ({"run.seed": []}, {}, "grid key run.seed = []: expected a list of values"),
    ({"run.workers": [1, 2]}, {}, "grid key run.workers changes no result: remove it"),
    ({}, {}, "small.toml has no [grid] table"),
    ([{"run.seed": [1]}, {}], {}, "small.toml has no [grid] table"),
    (
        [{"method.name": ["fedavg"], "method.c": [1.0]}, {"method.name": ["feddu"]}],
        {},
        "unknown key method.c",
    ),
]


@pytest.mark.parametrize(("swept", "sections", "message"), MISTAKES, ids=[each[2][:40] for each in MISTAKES])
def test_a_mistake_is_one_sentence_before_anything_is_trained(
    write: Write,
    grid: Command,
    tmp_path: Path,
    swept: Any,
    sections: dict[str, Any],
    message: str,
) -> None:
    code, printed, errors = grid(write(swept, **sections))
    assert (code, printed) == (2, "")
    sentence = errors.strip().splitlines()[-1]
    assert sentence.startswith("feddumap: ")
    assert message in sentence
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"), [("[grid\n", "is not valid TOML"), (None, "cannot read the grid")]
)
def test_a_bad_file(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(FeddumapError, match=message):
        cells(tmp_path / "bad.toml", tmp_path / "out")


# training them


def test_a_grid_is_trained_once_and_shown_again(write: Write, grid: Command, tmp_path: Path) -> None:
    file = write({"method.name": ["fedavg", "feddu"]})
    code, printed, errors = grid(file, "--jobs", "1")
    assert code == 0
    lines = [line for line in errors.splitlines() if "accuracy" in line]
    assert [line.partition(":")[0] for line in lines] == ["fedavg", "feddu"]
    assert "after 3 rounds in" in lines[0]
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["fedavg", "feddu"]
    assert max(map(len, printed.splitlines())) <= 120
    assert "┃ method " in printed
    summary = json.loads((tmp_path / "out" / "feddu" / "summary.json").read_text())
    accuracy = summary["accuracy"]
    assert rows[1][1:3] == [f"{100 * accuracy[key]:.1f} %" for key in ("final", "mean10")]
    assert rows[1][4:6] == [metric(summary["parameters"]), metric(summary["macs"])]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = grid(file)
    assert again[:2] == (0, printed)
    assert "accuracy" not in again[2]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    code, printed, _ = grid(file, "--json")
    values = json.loads(printed)
    assert [value["cell"] for value in values] == ["fedavg", "feddu"]
    assert {**values[1], **summary} == values[1]
    assert (values[1]["swept"], values[1]["error"]) == ({"method.name": "feddu"}, None)


def test_an_interrupted_cell_is_resumed_to_the_same_bits(write: Write, grid: Command, tmp_path: Path) -> None:
    file = write({"method.name": ["feddum"], "run.seed": [1, 2]})
    found = cells(file, tmp_path / "out")
    api.train(found[0].config, tmp_path / "whole")
    interrupted(found[0].config, found[0].path, 2)
    assert (read_state(found[0]).status, read_state(found[0]).done, read_state(found[1]).status) == (
        "interrupted",
        2,
        "new",
    )
    code, printed, _ = grid(file, "--dry-run")
    assert code == 0
    assert "interrupted at round 2/3" in printed
    assert grid(file, "--jobs", "1")[0] == 0
    assert bits(found[0].path) == bits(tmp_path / "whole")
    assert read_state(found[0]).status == read_state(found[1]).status == "finished"


def test_a_target_that_was_reached_is_an_end(write: Write, grid: Command, tmp_path: Path) -> None:
    file = write({"run.seed": [1]}, run={"target": 0.0})
    assert grid(file)[0] == 0
    (cell,) = cells(file, tmp_path / "out")
    assert (read_state(cell).done, cell.rounds, read_state(cell).status) == (1, 3, "finished")


def test_a_summary_from_before_more_rounds_is_no_end(write: Write, grid: Command, tmp_path: Path) -> None:
    assert grid(write({"run.seed": [1]}, train={"rounds": 1}))[0] == 0
    api.resume(tmp_path / "out" / "1", rounds=2).close()  # and killed at once
    file = write({"run.seed": [1]}, train={"rounds": 2})
    (cell,) = cells(file, tmp_path / "out")
    assert read_state(cell).status == "interrupted"
    assert grid(file)[0] == 0
    assert (read_state(cell).status, read_state(cell).done) == ("finished", 2)


def test_another_configuration_is_refused_by_its_key(write: Write, grid: Command, tmp_path: Path) -> None:
    file = write({"run.seed": [1, 2]}, train={"rounds": 1})
    (first, _) = cells(file, tmp_path / "out")
    interrupted(first.config.replace(run={"workers": 2}), first.path, 0)
    assert len(cells(file, tmp_path / "out")) == 2, "the number of workers may differ"
    code, _, errors = grid(file, "--set", "train.lr=0.3")
    assert code == 2
    assert "cell 1: " in errors
    assert "train.lr is 0.05 there, 0.3 here" in errors
    assert "give --out another name" in errors
    assert "feddumap resume" not in errors
    assert not (tmp_path / "out" / "2").exists()
    (tmp_path / "out" / "2").mkdir()
    (tmp_path / "out" / "2" / "letter").touch()
    code, _, errors = grid(file)
    assert code == 2
    assert "cell 2: " in errors
    assert "is not a run directory" in errors


def test_rounds_are_added_as_the_refusal_says(write: Write, grid: Command, tmp_path: Path) -> None:
    file = write({"run.seed": [1, 2]}, train={"rounds": 1})
    assert grid(file)[0] == 0
    code, _, errors = grid(file, "--set", "train.rounds=2")
    assert code == 2
    assert "train.rounds is 1 there, 2 here" in errors
    assert "to add rounds, run `feddumap resume CELL --rounds 2` for each cell" in errors
    for cell in cells(file, tmp_path / "out"):
        api.resume(cell.path, rounds=2).run().close()
    assert grid(file, "--set", "train.rounds=2")[0] == 0


def test_a_resumed_cell_takes_all_keys_that_change_no_result(write: Write, tmp_path: Path) -> None:
    (cell,) = cells(write({"run.seed": [1]}), tmp_path / "out")
    interrupted(cell.config, cell.path, 1)
    changed = {"timeout": 5.0, "least_share": 0.25, "workers": 2}
    assert jobs.train_cell(cell.path, cell.config.replace(run=changed)) is None
    stored = read_config(cell.path).run
    assert {key: getattr(stored, key) for key in changed} == changed


def test_a_failing_cell_does_not_stop_the_others(write: Write, grid: Command, tmp_path: Path) -> None:
    file = write({"run.seed": [1, 2]}, train={"rounds": 2})
    first, second = cells(file, tmp_path / "out")
    interrupted(first.config, first.path, 1)
    (first.path / "split.safetensors").write_bytes(b"")
    code, printed, errors = grid(file, "--jobs", "1")
    assert code == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("1 failed: ")]
    assert "split.safetensors" in line
    assert "Traceback" not in errors
    assert "failed: 1 (reasons above)" in errors
    assert read_state(second).status == "finished"
    assert len([line for line in printed.splitlines() if line.startswith("│")]) == 2
    code, printed, _ = grid(file, "--json")
    bad, good = json.loads(printed)
    assert (code, good["error"], good["rounds"]) == (1, None, 2)
    assert "split.safetensors" in bad["error"]
    assert "accuracy" not in bad


def test_a_bug_is_one_sentence_too(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = cells(write({"run.seed": [1]}), tmp_path)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(api.Run, "iterate", broken)
    said = jobs.train_cell(cell.path, cell.config)
    assert said == f"ZeroDivisionError: by zero; for a traceback run `feddumap resume {cell.path}`"


def test_a_dry_run_writes_nothing(write: Write, grid: Command, tmp_path: Path) -> None:
    file = write({"method.name": ["fedavg", "feddu"]})
    code, printed, _ = grid(file, "--dry-run")
    assert code == 0
    assert "2 cells: 2 new; no estimate for lenet on digits" in printed
    code, printed, _ = grid(file, "--dry-run", "--json")
    value = json.loads(printed)
    assert value["cells"][0] == {"cell": "fedavg", "state": "new", "done": 0, "rounds": 3}
    assert value["no_pace_yet"] == ["lenet on digits"]
    assert not (tmp_path / "out").exists()


def test_the_time_left(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "cores", lambda: 2)
    one, two, three = cells(write({"run.seed": [1, 2, 3]}, train={"rounds": 10}), tmp_path)
    plan = [
        (one, CellState("finished", 10, 4.0)),
        (two, CellState("interrupted", 5, 2.0)),
        (three, CellState("new")),
    ]
    # 5 rounds of 2 s, and 10 of the median of 4 and 2: 40 s of work, but 30 s of it are one cell's
    assert time_left(plan, 1) == (40.0, [])
    assert time_left(plan, 2) == (30.0, [])
    assert time_left([(three, CellState("new"))], 1) == (0.0, ["lenet on digits"])
    # besides their rounds, two of them take 7 s each, unless they have started
    assert time_left(plan, 1, 7.0) == (54.0, [])
    assert time_left(plan, 1, 7.0, {"2"}) == (47.0, [])
    assert time_left(plan, 2, 7.0, {"2"}) == (37.0, [])
    assert time_left([(three, CellState("new"))], 1, 7.0) == (7.0, ["lenet on digits"])


def test_what_cells_take_besides_their_rounds() -> None:
    overhead = Overhead(["a", "b", "c"], 2, now=100.0)
    assert overhead.mean() is None
    overhead.trained("a", 0.0, 102.0)
    assert overhead.mean() is None, "still no round"
    overhead.trained("a", 1.0, 104.0)  # begun at 100, so 3 s went into something else
    overhead.trained("a", 1.5, 109.0)  # in the midst of its second round
    assert (overhead.mean(), set(overhead.started)) == (3.0, {"a"})
    overhead.trained("b", 1.0, 106.0)  # 5 s
    assert overhead.mean() == 4.0
    overhead.ended("a", 6.0, 110.0)  # 4 s: one of them to write its end
    assert overhead.mean() == 4.5
    overhead.trained("c", 2.0, 118.0)  # it began as the first one ended: 6 s
    assert overhead.mean() == 5.0


def test_what_never_happens_is_said_once_with_its_methods(write: Write, grid: Command) -> None:
    file = write({"method.name": ["fedavg", "hrank", "imc", "prunefl"], "run.seed": [1, 2]})
    expected = [
        "method.prune_round = 30 is not reached in 3 rounds: nothing will be pruned (hrank, imc)",
        "method.adjust_every = 50 is not reached in 3 rounds: the mask will not be adjusted (prunefl)",
    ]
    code, _, errors = grid(file, "--dry-run")
    assert (code, [line for line in errors.splitlines() if "not reached" in line]) == (0, expected)
    code, _, errors = grid(file, "--dry-run", "--set", "train.rounds=51")
    assert (code, "not reached" in errors) == (0, False)


def test_a_grid_says_what_its_runs_say(home: Path) -> None:
    """The configuration alone tells what a run says at its start."""
    for name in [name for name in RECIPES if settings_model(name).model_fields.keys() & NEVER.keys()]:
        said: list[str] = []
        run = api.start(small(method={"name": name}, train={"rounds": 1}), say=said.append)
        next(iter(run))
        run.close()
        assert [each for each in said if "is not reached" in each] == unreached(run.config) != [], name


# processes


def test_processes_give_the_same_bits(write: Write, grid: Command, tmp_path: Path) -> None:
    """Whether a cell begins in its process or goes on there."""
    file = write({"method.name": ["fedavg", "feddum"]})
    found = cells(file, tmp_path / "out")
    interrupted(found[1].config, found[1].path, 1)
    assert grid(file, "--jobs", "2")[0] == 0
    for cell in found:
        api.train(cell.config, tmp_path / "alone" / cell.name)
        assert bits(cell.path) == bits(tmp_path / "alone" / cell.name)
        assert read_config(cell.path).replace(run={"workers": 1}) == cell.config


def test_a_process_tells_what_went_wrong(write: Write, tmp_path: Path) -> None:
    (cell,) = cells(write({"run.seed": [1]}), tmp_path / "out")
    interrupted(cell.config, cell.path, 1)
    (cell.path / "split.safetensors").write_bytes(b"")
    with jobs.CellProcesses() as processes:
        said = processes.run(cell.path, cell.config)
    assert said is not None
    assert said.startswith(f"cannot read {cell.path / 'split.safetensors'}")
    assert processes.run(cell.path, cell.config) is None, "no more are begun once it stops"


def children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    return [pid for pid, of in pairs if of == parent]


def alive(pid: int) -> bool:
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.startswith("Z")


@pytest.mark.parametrize(
    ("how", "expected"), [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)]
)
def test_an_end_leaves_resumable_cells_and_no_processes(
    write: Write, grid: Command, tmp_path: Path, how: signal.Signals, expected: int
) -> None:
    file = write({"run.seed": [1, 2, 3]}, train={"rounds": 4000, "epochs": 5}, run={"checkpoint_every": 1000})
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "feddumap", "grid", str(file), "--out", str(out), "--jobs", "2"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while not all(len(read_records(out / name)) >= 2 for name in "12"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pids = children(process.pid)
    assert len(pids) == 2
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == expected
    assert "Traceback" not in errors
    if how == signal.SIGINT:
        (line,) = [line for line in errors.splitlines() if line.startswith("stopped; resume with the same")]
        assert line.endswith(f"feddumap grid {file} --out {out} --jobs 2")
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not (out / "3").exists()
    found = cells(file, out)
    assert [read_state(cell).status for cell in found] == ["interrupted", "interrupted", "new"]
    # both had time to save where they were, though no checkpoint was due, and go on from there exactly
    done = read_checkpoint(max((out / "1").glob("checkpoint-*.json"))).state.round
    assert done == len(read_records(out / "1")) >= 2
    if how == signal.SIGKILL:
        return
    run = api.resume(out / "1", rounds=done + 1)
    run.run().close()
    api.train(found[0].config.replace(train={"rounds": done + 1}), tmp_path / "whole")
    assert bits(out / "1") == bits(tmp_path / "whole")


# what is shipped


def test_the_shipped_grid_holds_every_method(home: Path, tmp_path: Path) -> None:
    found = cells(ROOT / "configs" / "methods.toml", tmp_path)
    assert names(found) == list(RECIPES)
    pruned = [cell for cell in found if "prune_round" in cell.config.method.settings]
    assert pruned
    assert all(cell.config.method.settings["prune_round"] < cell.rounds for cell in pruned)
