"""`feddumap compare`: spreads over seeds, times to targets, and the test against the base."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from scipy import stats
from scipy.signal import savgol_filter

from feddumap.cli import main as cli
from feddumap.errors import FeddumapError
from feddumap.report.notes import notes
from feddumap.report.series import find_runs, group_runs
from feddumap.report.statistics import Comparison, SeriesStatistics, compare, holm, paired_difference, spread
from tests.conftest import small

Call = Callable[..., tuple[int, str, str]]


def write_run(
    path: Path,
    accuracies: Sequence[float | None],
    method: str = "fedavg",
    seed: int = 1,
    *,
    rounds: int | None = None,
    pace: float = 2.0,
    macs: int = 651_720,
    **sections: dict[str, Any],
) -> None:
    """A run directory as a run leaves it: a round lasts `pace` seconds and sends 1,000 bytes down, 900 up.
    With more `rounds` than accuracies it is not finished."""
    configured = {"rounds": rounds or len(accuracies), **sections.pop("train", {})}
    run = {"seed": seed, **sections.pop("run", {})}
    config = small(train=configured, run=run, method={"name": method}, **sections)
    path.mkdir(parents=True)
    (path / "config.toml").write_text(tomli_w.dumps(config.to_toml()))
    records = [
        {
            "round": number,
            "accuracy": accuracy,
            "parameters": 62_006,
            "macs": macs,
            "bytes_down": 1000,
            "bytes_up": 900,
            "clock": pace * (number + 1),
            "wall": 0.1,
        }
        for number, accuracy in enumerate(accuracies)
    ]
    (path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if configured["rounds"] == len(accuracies):
        (path / "summary.json").write_text(json.dumps({"rounds": len(records)}))


def compared(path: Path, **options: Any) -> tuple[Comparison, dict[str, SeriesStatistics]]:
    value = compare(group_runs(find_runs([path])), **options)
    return value, {row.label: row for row in value.rows}


def said(path: Path, **options: Any) -> str:
    found = group_runs(find_runs([path]))
    return "\n".join(notes(found, compare(found, **options)))


@pytest.fixture
def three(tmp_path: Path) -> dict[str, np.ndarray]:
    """FedAvg and FedDU with three seeds each and 40 rounds; returns their curves, seed by round."""
    generator = np.random.default_rng(5)
    curves = {}
    for method, gain in (("fedavg", 0.0), ("feddu", 0.1)):
        rise = 0.1 + 0.6 * (1 - np.exp(-np.arange(40) / 10)) + gain
        curves[method] = rise + 0.02 * generator.standard_normal((3, 40))
        for seed, curve in enumerate(curves[method], 1):
            path = tmp_path / f"{method}-{seed}"
            write_run(path, curve.tolist(), method, seed, macs=651_720 + seed * (method == "feddu"))
    return curves


def test_accuracy_is_mean_and_sample_deviation_over_seeds(
    three: dict[str, np.ndarray], tmp_path: Path
) -> None:
    _, rows = compared(tmp_path)
    for method, curves in three.items():
        expected = {
            "final": curves[:, -1],
            "mean10": curves[:, -10:].mean(axis=1),
            "best_smoothed": savgol_filter(curves, 39, 3, axis=1).max(axis=1),
        }
        for measure, values in expected.items():
            found = rows[method].accuracy[measure]
            assert found is not None
            assert (found.mean, found.n) == (pytest.approx(values.mean(), abs=1e-12), 3)
            assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)


def test_cost_is_of_the_last_record_and_bytes_of_all(three: dict[str, np.ndarray], tmp_path: Path) -> None:
    _, rows = compared(tmp_path)
    cost = rows["feddu"].cost
    assert (cost["macs"].mean, cost["macs"].std) == (651_722, 1.0)
    assert (cost["parameters"].mean, cost["parameters"].std) == (62_006, 0.0)
    assert (cost["bytes_down"].mean, cost["bytes_up"].mean, cost["clock"].mean) == (40_000, 36_000, 80.0)
    assert isinstance(cost["bytes_down"].mean, int)


def test_one_seed_has_no_deviation() -> None:
    found = spread([0.25])
    assert found is not None
    assert (found.mean, found.std, found.n) == (0.25, None, 1)


# time to a target


def test_time_to_a_target_and_its_ratio(three: dict[str, np.ndarray], tmp_path: Path) -> None:
    _, rows = compared(tmp_path, targets=[0.5])
    means = {}
    for method, curves in three.items():
        smooth = savgol_filter(curves, 39, 3, axis=1)
        clocks = 2.0 * (np.argmax(smooth >= 0.5, axis=1) + 1)
        (time,) = rows[method].times
        assert (time.reached, time.seeds) == (3, 3)
        assert time.clock is not None
        assert time.clock.mean == pytest.approx(clocks.mean())
        assert time.clock.std == pytest.approx(np.std(clocks, ddof=1))
        means[method] = clocks.mean()
    assert rows["feddu"].times[0].ratio == pytest.approx(means["feddu"] / means["fedavg"])
    assert means["feddu"] < means["fedavg"]
    assert rows["fedavg"].times[0].ratio == 1


def test_a_target_that_some_seeds_reached_has_no_mean(tmp_path: Path) -> None:
    for seed, last in ((1, 0.6), (2, 0.4), (3, 0.7)):
        write_run(tmp_path / f"a{seed}", [0.1, last], "feddu", seed)
        write_run(tmp_path / f"b{seed}", [0.5, 0.6], "fedavg", seed)
    _, rows = compared(tmp_path, targets=[0.5, 0.9])
    half, most = rows["feddu"].times
    assert (half.reached, half.seeds, half.clock, half.ratio) == (2, 3, None, None)
    assert (most.reached, most.clock) == (0, None)
    assert rows["feddu"].runs[1].targets == {"0.5": None, "0.9": None}
    assert rows["feddu"].runs[2].targets["0.5"] == {"round": 1, "clock": 4.0}


def test_targets_come_from_the_runs_unless_given(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1, 0.2], run={"targets": [0.3, 0.2]})
    write_run(tmp_path / "b", [0.1, 0.2], "feddu", run={"target": 0.25, "targets": [0.2]})
    assert compared(tmp_path)[0].targets == (0.2, 0.25, 0.3)
    assert compared(tmp_path, targets=[0.7, 0.1])[0].targets == (0.1, 0.7)
    with pytest.raises(FeddumapError, match=r"--target 50: expected .* 0\.5 for 50 %"):
        compared(tmp_path, targets=[50.0])


# the base


def test_the_base_is_fedavg_with_the_most_seeds_or_the_first(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1], "feddu")
    assert compared(tmp_path)[0].base == "feddu"
    write_run(tmp_path / "b", [0.1], "fedavg")
    assert compared(tmp_path)[0].base == "fedavg"
    assert compared(tmp_path, base="feddu")[0].base == "feddu"
    write_run(tmp_path / "c", [0.1], "fedavg", train={"lr": 0.1})
    assert compared(tmp_path)[0].base == "fedavg lr=0.05"
    write_run(tmp_path / "d", [0.1], "fedavg", seed=2, train={"lr": 0.1})
    assert compared(tmp_path)[0].base == "fedavg lr=0.1"
    with pytest.raises(
        FeddumapError,
        match=r"--base 'fedavg' is not a series: expected one of 'feddu', 'fedavg lr=0.05', 'fedavg lr=0.1'",
    ):
        compared(tmp_path, base="fedavg")


# the test


@pytest.mark.parametrize("measure", ["final", "mean10"])
def test_the_paired_test_is_students(three: dict[str, np.ndarray], tmp_path: Path, measure: Any) -> None:
    _, rows = compared(tmp_path, measure=measure)
    last = 1 if measure == "final" else 10
    values = {method: curves[:, -last:].mean(axis=1) for method, curves in three.items()}
    difference = values["feddu"] - values["fedavg"]
    error = np.std(difference, ddof=1) / np.sqrt(3)
    half = stats.t.ppf(0.975, 2) * error
    found = rows["feddu"].difference
    assert found is not None
    assert found.seeds == (1, 2, 3)
    assert found.mean == pytest.approx(difference.mean())
    assert (found.low, found.high) == pytest.approx((difference.mean() - half, difference.mean() + half))
    p = 2 * stats.t.sf(abs(difference.mean() / error), 2)
    assert found.p == found.holm == pytest.approx(p)
    assert rows["fedavg"].difference is None


def test_only_common_seeds_are_paired(tmp_path: Path) -> None:
    ours, theirs = {1: 0.5, 2: 0.7, 4: 0.1}, {1: 0.4, 2: 0.5, 3: 0.9}
    for seed, value in ours.items():
        write_run(tmp_path / f"a{seed}", [value], "feddu", seed)
    for seed, value in theirs.items():
        write_run(tmp_path / f"b{seed}", [value], "fedavg", seed)
    _, rows = compared(tmp_path)
    found = rows["feddu"].difference
    assert found is not None
    assert found.seeds == (1, 2)
    assert found.mean == pytest.approx(0.15)
    assert found.p == pytest.approx(2 * stats.t.sf(0.15 / 0.05, 1))


def test_one_common_seed_gives_no_test(tmp_path: Path) -> None:
    found = paired_difference({1: 0.5, 2: 0.6}, {2: 0.1, 3: 0.2})
    assert (found.seeds, found.mean, found.low, found.high, found.p) == ((2,), None, None, None, None)
    write_run(tmp_path / "a", [0.5], "feddu", 1)
    write_run(tmp_path / "b", [0.4], "fedavg", 2)
    assert "No significance test against fedavg: it needs at least two common seeds." in said(tmp_path)


def test_identical_differences_give_the_limits() -> None:
    base = {seed: value / 300 for seed, value in enumerate((100, 151, 202))}
    ahead = paired_difference({seed: (300 * value + 7) / 300 for seed, value in base.items()}, base)
    assert (ahead.p, ahead.constant) == (0.0, True)
    assert ahead.mean == ahead.low == ahead.high == pytest.approx(7 / 300)
    same = paired_difference(base, base)
    assert (same.mean, same.low, same.high, same.p, same.constant) == (0.0, 0.0, 0.0, 1.0, True)
    one_image = paired_difference({0: 101 / 300, 1: 151 / 300}, {0: 100 / 300, 1: 151 / 300})
    assert not one_image.constant
    assert one_image.p == pytest.approx(0.5), "t = 1 with one degree of freedom"


def test_holm_against_the_definition() -> None:
    generator = np.random.default_rng(1)
    for count in (1, 2, 5):
        values = generator.random(count) * 0.1
        order = np.argsort(values)
        expected = np.empty(count)
        for place, index in enumerate(order):
            expected[index] = min(1, max((count - j) * values[order[j]] for j in range(place + 1)))
        assert holm(values.tolist()) == pytest.approx(expected.tolist())
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_p_values_are_adjusted_for_the_series_that_could_be_tested(tmp_path: Path) -> None:
    values = {"fedavg": (0.4, 0.5, 0.6), "feddu": (0.5, 0.61, 0.72), "feddum": (0.45, 0.5, 0.62)}
    for method, finals in values.items():
        for seed, final in enumerate(finals):
            write_run(tmp_path / f"{method}{seed}", [final], method, seed)
    write_run(tmp_path / "alone", [0.9], "fedprox", 9)
    _, rows = compared(tmp_path)
    small_p, large_p = sorted(
        stats.ttest_rel(values[method], values["fedavg"]).pvalue for method in ("feddu", "feddum")
    )
    found = {label: row.difference for label, row in rows.items()}
    assert found["feddu"] is not None
    assert found["feddu"].p == pytest.approx(small_p)
    assert found["feddu"].holm == pytest.approx(2 * small_p)
    assert found["feddum"] is not None
    assert found["feddum"].holm == pytest.approx(max(2 * small_p, large_p))
    assert found["fedprox"] is not None
    assert found["fedprox"].holm is None


# notes


def test_nothing_to_say_about_equals(three: dict[str, np.ndarray], tmp_path: Path) -> None:
    assert said(tmp_path) == ""


def test_unequal_and_unfinished_runs_are_named_and_counted_as_they_are(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", [0.1] * 12, "fedavg", seed)
        write_run(tmp_path / f"b{seed}", [0.2] * (13 - seed), "feddu", seed, rounds=12)
    write_run(tmp_path / "short", [0.3] * 3, "feddum", 1)
    text = said(tmp_path)
    assert "numbers of rounds: 12 in most; 11 in feddu (seed 2); 3 in feddum." in text
    assert "Not finished, included with the rounds so far: feddu seed 2 (11 of 12 rounds)." in text
    assert "Fewer than ten evaluated rounds" in text
    assert text.count("feddum") == 2, "its rounds and its few evaluations"
    row = compared(tmp_path)[1]["feddu"]
    assert [run.rounds for run in row.runs] == [12, 11]
    assert row.cost["bytes_down"].mean == 11_500


def test_a_run_that_was_given_more_to_do_is_not_finished(tmp_path: Path) -> None:
    """Its summary is of the rounds it had before."""
    write_run(tmp_path / "run", [0.1] * 12, rounds=20)
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"rounds": 10}))
    (run,) = find_runs([tmp_path])
    assert not run.finished


def test_a_run_without_an_evaluation_is_left_out_of_the_accuracy(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], seed=1)
    write_run(tmp_path / "b", [None], seed=2)
    assert "Not evaluated yet, so without an accuracy: fedavg (seed 2)." in said(tmp_path)
    row = compared(tmp_path, targets=[0.4])[1]["fedavg"]
    assert row.accuracy["final"] == spread([0.5])
    assert (row.times[0].reached, row.times[0].seeds, row.times[0].clock) == (1, 2, None)


def test_other_settings_than_the_methods_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1] * 10, "fedavg")
    write_run(tmp_path / "b", [0.1] * 10, "feddu", train={"lr": 0.2}, data={"name": "digits", "devices": 8})
    assert "differ from those of fedavg: data.devices, train.lr in feddu." in said(tmp_path)


def test_a_constant_difference_is_named(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", [0.25 * seed] * 10, "fedavg", seed)
        write_run(tmp_path / f"b{seed}", [0.25 * seed + 0.25] * 10, "feddu", seed)
    assert "is the same for every seed, so its variance is zero" in said(tmp_path)


# the command


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["feddumap", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err

    return run


def test_the_terminal_shows_everything(three: dict[str, np.ndarray], tmp_path: Path, call: Call) -> None:
    code, out, _ = call(tmp_path, "--target", "0.5", "--target", "0.99")
    assert code == 0
    final = three["feddu"][:, -1]
    assert f"{100 * final.mean():.2f} ± {100 * np.std(final, ddof=1):.2f}" in out
    for words in (
        "to 50 % (s)",
        "not reached",
        "652 k",
        "40.0 kB",
        "paired t-test",
        "mean accuracy of the last 10",
    ):
        assert words in out
    assert "p (Holm)" not in out, "there is but one test"


def test_single_seeds_show_no_deviation(tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "a", [0.5, 0.6])
    write_run(tmp_path / "b", [0.5, 0.7], "feddu")
    _, out, _ = call(tmp_path)
    assert "±" not in out
    assert "needs at least two common seeds" in out


def test_partly_reached_targets_and_untestable_series_are_said_so(tmp_path: Path, call: Call) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"a{seed}", [0.1, 0.2 * seed], "fedavg", seed)
        write_run(tmp_path / f"b{seed}", [0.1, 0.3 * seed - 0.05], "feddu", seed)
    write_run(tmp_path / "c", [0.1, 0.2], "fedprox", 1)
    _, out, _ = call(tmp_path, "--target", "0.4", "--format", "markdown")
    lines = {line.split("|")[1].strip(): line for line in out.splitlines() if "2 of 3 seeds" in line}
    assert set(lines) == {"fedavg", "feddu"}
    assert "| fedprox | 1 | - | - | - | needs at least two common seeds |" in out


def test_the_cheapest_is_marked_only_among_runs_of_equal_length(tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "a", [0.1] * 3, "fedavg")
    write_run(tmp_path / "b", [0.2] * 3, "feddu", pace=1.0, macs=600_000)
    options = (tmp_path, "--format", "markdown")
    assert "| feddu | **3.0** |" in call(*options)[1]
    write_run(tmp_path / "c", [0.1] * 2, "fedprox", pace=1.0)
    _, out, _ = call(*options)
    assert "| feddu | 3.0 |" in out
    assert "| fedprox | 2.0 |" in out
    assert "| **600 k** |" in out, "the model at the end does not depend on it"


def test_json_has_every_run(three: dict[str, np.ndarray], tmp_path: Path, call: Call) -> None:
    _, out, _ = call(tmp_path, "--format", "json", "--target", "0.5", "--measure", "final")
    value = json.loads(out)
    assert (value["base"], value["measure"], value["targets"]) == ("fedavg", "final", [0.5])
    feddu = next(each for each in value["series"] if each["label"] == "feddu")
    assert [run["seed"] for run in feddu["runs"]] == [1, 2, 3]
    assert [run["accuracy"]["final"] for run in feddu["runs"]] == three["feddu"][:, -1].tolist()
    assert feddu["runs"][0]["targets"]["0.5"]["clock"] > 0
    assert feddu["difference"]["seeds"] == [1, 2, 3]
    assert "ttest_rel" in value["test"]


def test_csv_has_one_row_a_series_of_plain_numbers(
    three: dict[str, np.ndarray], tmp_path: Path, call: Call
) -> None:
    write_run(tmp_path / "short", [0.3] * 3, "feddum", 1)
    file = tmp_path / "table.csv"
    code, out, err = call(tmp_path, "--format", "csv", "--target", "0.5", "--out", file)
    assert (code, out) == (0, "")
    assert "3 in feddum" in err
    rows = {row["series"]: row for row in csv.DictReader(file.read_text().splitlines())}
    assert list(rows) == ["fedavg", "feddu", "feddum"]
    final = three["feddu"][:, -1]
    assert float(rows["feddu"]["final_mean"]) == pytest.approx(final.mean())
    assert float(rows["feddu"]["final_std"]) == pytest.approx(np.std(final, ddof=1))
    assert (rows["feddu"]["final_n"], rows["feddu"]["seeds"]) == ("3", "3")
    assert (rows["feddu"]["bytes_down_mean"], rows["feddum"]["final_std"]) == ("40000", "")
    assert (rows["feddum"]["time_to_0.5_mean"], rows["feddum"]["time_to_0.5_reached"]) == ("", "0")
    assert float(rows["feddu"]["p"]) < 1
    assert rows["fedavg"]["p"] == rows["feddum"]["p"] == ""


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "a", [0.5])
    code, _, err = call(tmp_path, "--out", tmp_path / "missing" / "table.md", "--format", "markdown")
    assert (code, err.count("\n")) == (2, 1)
    assert call(tmp_path / "nowhere")[0] == 2


def test_what_never_happened_is_a_note(tmp_path: Path) -> None:
    for method in ("fedavg", "hrank", "imc"):
        write_run(tmp_path / method, [0.1, 0.2, 0.3], method, 1)
    expected = "method.prune_round = 30 is not reached in 3 rounds: nothing will be pruned (hrank, imc)."
    assert expected in said(tmp_path).splitlines()
