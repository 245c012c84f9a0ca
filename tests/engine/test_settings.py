"""A run's own settings of torch hold while it trains, and not between two of its rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from feddumap import run as api
from feddumap.core.tensors import digest
from tests.conftest import small


def flushes_denormals() -> bool:
    return not bool(torch.full((8,), 1e-40).mul(1.0).ne(0).any())


@pytest.fixture
def settings() -> Iterator[tuple[int, bool, bool]]:
    """Settings of the caller that a run does not have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2, flushes_denormals(), torch.backends.cudnn.deterministic
    torch.set_num_threads(threads)


def found() -> tuple[int, bool, bool]:
    return torch.get_num_threads(), flushes_denormals(), torch.backends.cudnn.deterministic


def test_the_caller_has_its_own_settings_between_two_rounds(
    home: object, settings: tuple[int, bool, bool]
) -> None:
    run = api.start(small())
    for _ in run:
        assert found() == settings
    assert found() == settings
    assert digest(run.state.weights) == digest(api.train(small()).state.weights)


def test_two_runs_in_turns_are_those_alone(home: object, settings: tuple[int, bool, bool]) -> None:
    configs = [small(), small(run={"seed": 5})]
    runs = [api.start(config) for config in configs]
    for _ in zip(*runs, strict=True):
        assert found() == settings
    for run, config in zip(runs, configs, strict=True):
        assert digest(run.state.weights) == digest(api.train(config).state.weights)


def test_a_run_that_is_left_restores_them(home: object, settings: tuple[int, bool, bool]) -> None:
    rounds = iter(api.start(small()))
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    assert found() == settings
