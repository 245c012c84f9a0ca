"""The guarantee of a private run in words, in `inspect run` and in a comparison's notes."""

from __future__ import annotations

from typing import Any

from feddumap.report.notes import notes
from feddumap.report.series import RecordedRun, group_runs
from feddumap.report.statistics import compare
from feddumap.runs.privacy import describe, statement
from tests.conftest import small

KEYS: dict[str, Any] = {"clip": 0.5, "noise": 2.0, "delta": 1e-5}
RECORDS = [{"round": 0, "epsilon": 1.5}, {"round": 1, "epsilon": 2.25}]


def test_the_statement_names_neighbours_sampling_and_what_voids_it() -> None:
    told = describe(small(privacy=KEYS), RECORDS)
    assert told is not None
    assert statement(told).startswith("ε = 2.25 at δ = 1e-05 for one device's whole data, added or removed;")
    assert "each of 6 devices joins a round with probability 0.5" in statement(told)
    assert "run.seed" not in statement(told)
    other = describe(small(privacy={**KEYS, "sampling": "fixed", "secret": False, "epsilon": 2.0}), RECORDS)
    assert other is not None
    assert "replaced by another; 3 of 6 devices are chosen without replacement" in statement(other)
    assert "above the target privacy.epsilon = 2" in statement(other)
    assert "no protection from those who know it" in statement(other)


def test_runs_without_privacy_and_without_rounds() -> None:
    assert describe(small(), RECORDS) is None
    nothing = describe(small(privacy=KEYS), [])
    assert nothing is not None
    assert statement(nothing) == "no round has been released yet"


def test_a_comparison_notes_the_guarantee(tmp_path: Any) -> None:
    line = {
        "accuracy": 0.5,
        "parameters": 1,
        "macs": 1,
        "bytes_down": 1,
        "bytes_up": 1,
        "clock": 1.0,
        "wall": 1,
    }
    records = [{**line, **record} for record in RECORDS]
    runs = [
        RecordedRun(tmp_path / "a", small(), records, True),
        RecordedRun(tmp_path / "b", small(privacy=KEYS), records, True),
    ]
    found = group_runs(runs)
    (said,) = [note for note in notes(found, compare(found)) if note.startswith("Privacy of ")]
    assert "ε = 2.25" in said
