"""Krum against its definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

from feddumap.screening.krum import hostile_count
from tests.support.screening import SIZE, merged, rule, updates, upload


def krum_scores(vectors: np.ndarray, hostile: int) -> np.ndarray:
    distances = ((vectors[:, None] - vectors[None]) ** 2).sum(axis=2)
    return np.array(
        [
            np.sort(np.delete(row, place))[: max(1, len(vectors) - hostile - 2)].sum()
            for place, row in enumerate(distances)
        ]
    )


@pytest.mark.parametrize("count", [4, 7, 10])
@pytest.mark.parametrize("hostile", [0.1, 0.3])
def test_selection_and_names(count: int, hostile: float) -> None:
    rng = np.random.default_rng(count)
    some = [upload(k, rng.normal(size=SIZE), int(rng.integers(1, 99))) for k in range(count)]
    vectors = np.array([updates(one.weights) for one in some])
    bad = hostile_count(hostile, count)
    order = krum_scores(vectors, bad).argsort(kind="stable")
    for name, kept in (("krum", sorted(order[:1])), ("multi-krum", sorted(order[: count - bad]))):
        screening = rule(name, hostile=hostile)
        found = updates(merged(screening, some).weights)
        weights = [some[k].samples for k in kept]
        np.testing.assert_allclose(found, np.average(vectors[kept], axis=0, weights=weights), atol=1e-7)
        _, metrics = screening.end()
        assert set(metrics["left_out"]) == {str(k) for k in range(count) if k not in kept}
        assert f"the {len(kept)} of {count}" in next(iter(metrics["left_out"].values()))


def test_what_comes_along_counts_too() -> None:
    """A device whose weights are ordinary and whose control variate is not is left out."""
    rng = np.random.default_rng(0)
    some = [upload(k, rng.normal(size=SIZE), 10, rng.normal(size=6)) for k in range(6)]
    some.append(upload(6, np.zeros(SIZE), 10, np.full(6, 1e4)))
    screening = rule("multi-krum", hostile=0.1)
    merged(screening, some)
    assert list(screening.left_out) == ["6"]
