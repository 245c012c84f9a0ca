"""The `density` rule: a pruning rate from the smoothed eigenvalue density of a node's Hessian."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from feddumap.pruning.curvature.lanczos import Spectrum

GRID, MARGIN = 10_000, 0.01
INCREMENT, SMALL_CHANGE, STABLE_STEPS = 0.1, 0.005, 3
HALVINGS = 40


def mass_above(spectrum: Spectrum) -> Callable[[float], float]:
    """r(t): the share of the spectrum's mass above t.

    The density is φ(x) = Σ w_i N(x; θ_i, σ²), σ² = 1e-5 · max(1, θ_max − θ_min), on 10000 points from
    θ_min − 0.01 to θ_max + 0.01, normalised.
    """
    low, high = float(spectrum.values.min()), float(spectrum.values.max())
    variance = 1e-5 * max(1.0, high - low)
    grid = np.linspace(low - MARGIN, high + MARGIN, GRID)
    density = np.zeros(GRID)
    for value, weight in zip(spectrum.values, spectrum.weights, strict=True):
        density += weight * np.exp(-((grid - value) ** 2) / (2 * variance))
    tail = np.append(np.cumsum(density[::-1])[::-1], 0.0) / density.sum()
    return lambda t: float(tail[np.searchsorted(grid, t, side="right")])


def stable_rate(above: Callable[[float], float]) -> float:
    """The first r(t), t = 0, inc, 2·inc, …, after three consecutive changes below 0.005.

    If r falls below half of r(0) first, the steps are too long: inc, initially 0.1, is halved and the search
    restarts.

    >>> stable_rate(lambda t: 0.4)
    0.4
    >>> stable_rate(lambda t: 0.9 if t < 0.25 else 0.6)
    0.6
    """
    first = above(0.0)
    rate, increment = first, INCREMENT
    for _ in range(HALVINGS):
        before, stable, steps = first, 0, 0
        while True:
            steps += 1
            rate = above(steps * increment)
            if rate < first / 2:
                break
            stable = stable + 1 if abs(rate - before) < SMALL_CHANGE else 0
            if stable == STABLE_STEPS:
                return rate
            before = rate
        increment /= 2
    return rate
