"""The census as a run directory keeps it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from feddumap.core.algorithm import Census
from feddumap.engine import census as censuses

LABELS = np.array([[3.0, 0.0, 1.5], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])


@pytest.mark.parametrize("labels", [None, LABELS])
def test_a_census_comes_back(labels: np.ndarray | None) -> None:
    """Device 1 has not answered: it has no samples, and is not among those stored."""
    census = Census(np.array([4, 0, 3]), labels)
    found = censuses.from_json(json.loads(json.dumps(censuses.to_json(census))), 3, 3)
    assert found.samples.tolist() == [4, 0, 3]
    assert (found.labels is None) == (labels is None)
    if found.labels is not None:
        assert found.labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"devices": 3}, "of 3 devices, expected 2"),
        ({"samples": {"0": -5, "1": 7}}, "device 0 has -5 samples"),
        ({"samples": {"0": 0, "1": 7}}, "device 0 has 0 samples"),
        ({"samples": {"0": 5.5, "1": 7}}, "device 0 has 5.5 samples"),
        ({"samples": {"0": 2**70, "1": 7}}, "it is no census"),
        ({"samples": {"0": 5, "-1": 7}}, "a device '-1' of 2"),
        ({"samples": {"0": 5, "2": 7}}, "a device '2' of 2"),
        ({"samples": [5, 7]}, "it is no census"),
        ({"labels": {"0": [1, 2, 3]}}, "not those of the devices"),
        ({"labels": {"0": [-1, 2, 3], "1": [1, 1, 1]}}, "labels of device 0 are not 3 non-negative"),
        ({"labels": {"0": [1, 2, 3], "1": [1, 1]}}, "labels of device 1 are not 3 non-negative"),
        ({"labels": {"0": [1, 2, 3], "1": [1, 1, float("nan")]}}, "labels of device 1 are not"),
        ({"labels": {"0": [1, 2, 3], "1": [1, 1, float("inf")]}}, "labels of device 1 are not"),
        ({"labels": {"0": [1, 2, 3], "1": ["1", "1", "1"]}}, "labels of device 1 are not"),
        ({"labels": {"0": 5, "1": 6}}, "it is no census"),
    ],
)
def test_an_altered_census_is_an_error(changes: dict[str, Any], reason: str) -> None:
    value = {"devices": 2, "samples": {"0": 5, "1": 7}, "labels": {"0": [1, 2, 2], "1": [0, 7, 0]}}
    assert censuses.from_json(value, 2, 3).samples.tolist() == [5, 7]
    with pytest.raises(ValueError, match=reason):
        censuses.from_json({**value, **changes}, 2, 3)
