"""`feddumap bench`: that it measures what it says. How long things take is not tested."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feddumap.bench import matrix, overhead, scale, workload
from feddumap.bench.memory import peak_memory
from feddumap.bench.rounds import bench_rounds
from feddumap.bench.workload import CLASSES, SEED, Times, Workload, measure, random_data
from feddumap.cli import main as cli
from feddumap.data import partition
from feddumap.engine.session import Session
from feddumap.methods.registry import RECIPES
from feddumap.models import architecture
from feddumap.models.cost import macs
from feddumap.training.kernels import loader

TINY = Workload(model="lenet", devices=4, cohort=2, samples=10, epochs=2, workers=1)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go; all are gone at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left_in(folder: Path) -> list[Path]:
    """Our temporary folders; torch makes one of its own."""
    return list(folder.glob("feddumap*"))


def check_times(found: dict[str, Any]) -> None:
    spread = found["spread"]
    order = [
        spread["min"],
        spread["lower_quartile"],
        found["seconds_per_round"],
        spread["upper_quartile"],
        spread["max"],
    ]
    assert order == sorted(order)
    assert order[0] > 0
    assert math.isfinite(order[-1])
    assert 0 < found["startup_seconds"] < math.inf


@pytest.mark.slow
def test_rounds(temporary: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = bench_rounds(TINY, 2, lambda *step: seen.append(step))
    check_times(found)
    assert found["kernels"] == f"c ({loader.require().variant})"
    assert found["samples_per_round"] == 2 * 10 * 2
    assert found["samples_per_second"] == pytest.approx(40 / found["seconds_per_round"])
    assert found["multiply_adds_per_round"] == 3 * macs(architecture("lenet", 10)) * 40
    possible = found["matrix_multiply_adds_per_second"] * found["seconds_per_round"]
    assert found["share_of_matrix_speed"] == pytest.approx(found["multiply_adds_per_round"] / possible)
    assert 0 < found["share_of_matrix_speed"] < 1.5
    assert seen == [("devices", done, 6) for done in range(1, 7)]
    assert left_in(temporary) == []


def test_the_setting_is_the_papers_and_is_never_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Workload().config(7)
    assert (config.data.devices, config.train.cohort, config.train.epochs) == (100, 10, 5)
    assert (config.train.batch, config.train.lr, config.method.name) == (10, 0.1, "fedavg")
    runs: list[Session] = []

    class Watched(Session):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            runs.append(self)

    monkeypatch.setattr(workload, "Session", Watched)
    with random_data(TINY.images) as data:
        times = measure(TINY, data, 2)
    assert [record["accuracy"] for record in runs[0].records] == [None] * 3
    assert runs[0].split.sizes.tolist() == [10] * 4
    assert len(times.rounds) == 2
    assert times.startup + sum(times.rounds) == pytest.approx(runs[0].records[-1]["wall"])


def test_quartiles() -> None:
    value = Times(1.0, [4.0, 1.0, 2.0, 3.0]).to_json()
    assert value["seconds_per_round"] == 2.5
    assert value["spread"] == {"min": 1.0, "lower_quartile": 1.75, "upper_quartile": 3.25, "max": 4.0}
    check_times(Times(1.0, [2.0]).to_json())


def test_the_random_data_is_the_same_each_time_and_removed_on_failure(temporary: Path) -> None:
    with random_data(20) as first, random_data(20) as second:
        assert np.array_equal(first.train_inputs, second.train_inputs)
        assert np.array_equal(first.train_labels, second.train_labels)
        assert len(np.unique(first.train_inputs)) == 256
    with pytest.raises(RuntimeError, match="stop"), random_data(20):
        raise RuntimeError("stop")
    assert left_in(temporary) == []


def test_an_echo_changes_nothing_and_is_no_listed_method() -> None:
    setting = Workload("lenet", devices=2, cohort=2, samples=1, epochs=1, workers=1, method=overhead.ECHO)
    with random_data(setting.images) as data:
        config = setting.config(2)
        run = Session(config, data, partition.split(data.train_labels, len(CLASSES), config.data, SEED))
        before = run.state.weights
        list(run)
    assert run.records[0]["bytes_up"] == 2 * 4 * 62_006
    for key, tensor in run.state.weights.items():
        assert torch.equal(tensor, before[key]), key
    assert overhead.ECHO not in RECIPES


@pytest.mark.slow
def test_overhead_with_worker_processes(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overhead.MODELS == ("lenet", "vgg11")
    monkeypatch.setattr(overhead, "MODELS", ("lenet",))
    found = overhead.bench_overhead(1, workers=2)
    (case,) = found["cases"]
    assert (case["model"], case["parameters"], found["workers"]) == ("lenet", 62_006, 2)
    check_times(case)
    assert left_in(temporary) == []


@pytest.mark.slow
def test_scale(temporary: Path) -> None:
    found = scale.bench_scale("lenet", 2, workers=1, sizes=((4, 2), (4, 4)))
    few, all_of_them = found["cases"]
    assert (few["devices"], few["cohort"], all_of_them["cohort"]) == (4, 2, 4)
    check_times(few)
    check_times(all_of_them)
    if sys.platform == "linux":
        assert few["peak_bytes"] > 1e7
        assert found["ratios"]["cohort_memory"] == all_of_them["peak_bytes"] / few["peak_bytes"]
    assert left_in(temporary) == []


def test_ratios_compare_what_is_comparable() -> None:
    def case(devices: int, cohort: int, seconds: float, peak: int | None) -> dict[str, Any]:
        return {"devices": devices, "cohort": cohort, "seconds_per_round": seconds, "peak_bytes": peak}

    cases = [case(100, 10, 1.0, 100), case(1000, 10, 1.5, 200), case(9000, 10, 2.0, 400)]
    expected = {"devices_seconds": 2.0, "devices_memory": 4.0, "cohort_memory": 3.0}
    assert scale.ratios([*cases, case(1000, 1000, 99.0, 600)]) == expected
    unknown = [{**each, "peak_bytes": None} for each in cases]
    expected_unknown = {"devices_seconds": 2.0, "devices_memory": None, "cohort_memory": None}
    assert scale.ratios(unknown) == expected_unknown


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_mapped_data_is_not_counted_as_memory(tmp_path: Path) -> None:
    """The peak with a file mapped and read, and leaving that file out, differ by its pages."""
    size = 32 << 20
    path = tmp_path / "data" / "array.npy"
    path.parent.mkdir()
    np.save(path, np.ones(size, np.uint8))
    mapped = np.load(path, mmap_mode="r")
    assert mapped.sum() == size
    counted, left_out = peak_memory(tmp_path / "elsewhere"), peak_memory(path.parent)
    assert counted is not None
    assert left_out is not None
    assert abs(counted - left_out - size) < size / 4  # reading about memory takes some


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(workload, "Workload", partial(Workload, devices=4, cohort=2, samples=10))
    monkeypatch.setattr(matrix, "matrix_throughput", lambda processes: nullcontext(lambda: 1e12 * processes))

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["feddumap", "bench", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        assert stopped.value.code == (2 if captured.err else 0)
        return captured.out + captured.err

    order = ("rounds", "--model", "lenet", "--rounds", "1", "--epochs", "1", "--workers", "1")
    assert "lenet · 1 round · 1 worker" in call(*order)
    found = json.loads(call(*order, "--json"))
    assert (found["model"], found["workers"], found["epochs"], found["rounds"]) == ("lenet", 1, 1, 1)
    assert found["kernels"].startswith("c (")
    assert json.loads(call(*order, "--json", "--kernels", "torch"))["kernels"] == "torch"
    assert "train.kernels = 'c' with resnet18" in call("rounds", "--model", "resnet18", "--kernels", "c")
    assert "unknown model 'lent'" in call("rounds", "--model", "lent")
    assert "unknown model 'lent'" in call("scale", "--model", "lent")


def test_flower(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Times and bytes are put side by side; tests/flower/test_up.py has a real federation up."""
    pytest.importorskip("flwr", reason="needs Flower: pip install 'feddumap[flower]'")
    from feddumap import run as api
    from feddumap.flower.local import up
    from feddumap.flower.local.project import Project

    def carried_out(made: Project, nodes: int, say: Any, show: Any) -> up.Finished:
        run = api.train(made.config().replace(run={"engine": "local"}), made.run)
        down, back = (sum(record[key] for record in run.records) for key in ("bytes_down", "bytes_up"))
        return up.Finished(run.summary, up.Traffic(down, back, down + down // 10, back + back // 20))

    monkeypatch.setattr(up, "up", carried_out)
    for options in ([], ["--json"]):
        monkeypatch.setattr(
            sys, "argv", ["feddumap", "bench", "flower", "--nodes", "2", "--rounds", "1", *options]
        )
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        said = capsys.readouterr().out
        assert options or "and 7.5% more bytes than the simulation counts" in " ".join(said.split())
    found = json.loads(said)
    assert found["same_weights"]
    assert (found["devices"], found["rounds"], found["model"]) == (2, 1, "lenet")
    assert found["bytes_down"]["counted"] == 2 * 2 * 4 * found["parameters"]
    assert found["flower"].keys() == found["simulation"].keys()
