"""The geometric median minimises the weighted sum of distances."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

from tests.support.screening import SIZE, merged, rule, updates, upload


def test_it_minimises_the_sum_of_distances() -> None:
    rng = np.random.default_rng(5)
    some = [upload(k, rng.normal(size=SIZE), int(rng.integers(1, 20))) for k in range(7)]
    vectors = np.array([updates(one.weights) for one in some])
    samples = np.array([one.samples for one in some])

    def total(point: np.ndarray) -> float:
        return float(samples @ np.linalg.norm(vectors - point, axis=1))

    best = minimize(total, np.average(vectors, axis=0, weights=samples), tol=1e-12).x
    found = updates(merged(rule("geometric-median", iterations=10_000), some).weights)
    np.testing.assert_allclose(found, best, atol=1e-5)
    few = updates(merged(rule("geometric-median", iterations=1), some).weights)
    assert total(found) < total(few) < total(np.average(vectors, axis=0, weights=samples))


def test_each_group_has_its_own() -> None:
    """One device is far away in its weights, another one in what comes along."""
    rng = np.random.default_rng(6)
    some = [upload(k, rng.normal(size=SIZE), 10, rng.normal(size=6)) for k in range(7)]
    some[0] = upload(0, np.full(SIZE, 1e6), 10, rng.normal(size=6))
    some[1] = upload(1, rng.normal(size=SIZE), 10, np.full(6, 1e6))
    found = merged(rule("geometric-median"), some)
    assert np.abs(updates(found.weights)).max() < 3
    assert float(found.extra["c/fc.weight"].abs().max()) < 3
