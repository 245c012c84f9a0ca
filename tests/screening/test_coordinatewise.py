"""Median and trimmed mean against numpy and scipy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

from feddumap.screening import coordinatewise
from feddumap.screening.coordinatewise import trimmed_mean
from tests.support.screening import SIZE, merged, rule, updates, upload


def uploads(count: int) -> list:  # type: ignore[type-arg]
    rng = np.random.default_rng(count)
    return [upload(k, rng.normal(size=SIZE), int(rng.integers(1, 99))) for k in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_median(count: int) -> None:
    some = uploads(count)
    expected = np.median([updates(one.weights) for one in some], axis=0)
    np.testing.assert_allclose(updates(merged(rule("median"), some).weights), expected, atol=1e-7)


@pytest.mark.parametrize(("count", "trim"), [(5, 0.2), (10, 0.3), (10, 0.29), (3, 0.1)])
def test_trimmed_mean(count: int, trim: float) -> None:
    some = uploads(count)
    expected = trim_mean(np.array([updates(one.weights) for one in some]), trim, axis=0)
    found = updates(merged(rule("trimmed", trim=trim), some).weights)
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_stretches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [{"w": torch.randn(50, generator=torch.Generator().manual_seed(k))} for k in range(6)]
    whole = trimmed_mean(models, 1)["w"]
    monkeypatch.setattr(coordinatewise, "STRETCH", 7)
    assert torch.equal(trimmed_mean(models, 1)["w"], whole)
