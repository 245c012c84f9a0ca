"""Whether a run is finished is defined once, and everyone who asks gets the same answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from feddumap import run as api
from feddumap.config import Config
from feddumap.report.series import find_runs
from feddumap.runs.inspect import describe
from feddumap.runs.summary import finished
from tests.conftest import small

KINDS = {
    "all rounds": {"train": {"rounds": 2}},
    "one round only": {"method": {"name": "fedkt", "vote_epochs": 1, "subsets": 2}},
    "target": {"run": {"target": 0.01}},
}


def answers(directory: Path) -> set[bool]:
    """By the run itself, by the directory, by `inspect run` and by reports."""
    run = api.resume(directory)
    run.close()
    (reported,) = find_runs([directory])
    return {run.finished, finished(directory), describe(directory)["finished"], reported.finished}


def config_of(kind: str) -> Config:
    return small().replace(**KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run(home: object, tmp_path: Path, kind: str) -> None:
    api.train(config_of(kind), tmp_path / "run")
    assert answers(tmp_path / "run") == {True}


@pytest.mark.parametrize("kind", KINDS)
def test_summaries_of_older_versions(home: object, tmp_path: Path, kind: str) -> None:
    """They do not say how many rounds were configured."""
    api.train(config_of(kind), tmp_path / "run")
    file = tmp_path / "run" / "summary.json"
    summary = json.loads(file.read_text())
    del summary["configured_rounds"]
    file.write_text(json.dumps(summary))
    assert answers(tmp_path / "run") == {True}


def test_a_run_that_was_given_more_rounds(home: object, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    api.train(small(train={"rounds": 2}), directory)
    api.resume(directory, rounds=4).close()
    assert answers(directory) == {False}  # none of them trained yet
    run = api.resume(directory)
    rounds = iter(run)
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    run.close()
    assert answers(directory) == {False}
    api.resume(directory).run().close()
    assert answers(directory) == {True}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"rounds": 2}'])
def test_a_summary_that_is_none(home: object, tmp_path: Path, text: str) -> None:
    directory = tmp_path / "run"
    run = api.start(small(), directory)
    rounds = iter(run)
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    run.close()
    (directory / "summary.json").write_text(text)
    assert not finished(directory)
