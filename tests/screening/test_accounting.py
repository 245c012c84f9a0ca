"""ε against published values and against a float64 oracle, and the search for the noise of a target ε."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from feddumap.errors import FeddumapError
from feddumap.screening import accounting
from feddumap.screening.accounting import ORDERS, Releases, calibrated

PUBLISHED = [
    (60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
    (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444845),
    (100_000_000, 1024, 0.1, 10, 1e-7, 5907982.31138195),
]
"""n, batch, noise multiplier, epochs, δ and ε of `test_compute_dp_sgd_privacy`, in TensorFlow Privacy's
privacy/analysis/compute_dp_sgd_privacy_lib_test.py, which computes them with dp-accounting."""


@pytest.mark.parametrize(("n", "batch", "noise", "epochs", "delta", "expected"), PUBLISHED)
def test_published_values(
    n: int, batch: int, noise: float, epochs: int, delta: float, expected: float
) -> None:
    steps = math.ceil(epochs * n / batch)
    assert Releases(n, batch, "poisson", noise).epsilon(steps, delta) == pytest.approx(expected, rel=1e-9)


def test_the_gaussian_mechanism_of_the_librarys_own_test() -> None:
    """A multiplier of 4.530877117 is (1, 1e-6)-DP exactly (test_compute_epsilon_delta_gaussian, in
    dp_accounting/rdp/rdp_privacy_accountant_test.py, with a finer grid of orders)."""
    epsilon = Releases(100, 100, "poisson", 4.530877117).epsilon(1, 1e-6)
    assert 1 <= epsilon < 1.001


def whole_cohort(multiplier: float, rounds: int, delta: float) -> float:
    """ε without sampling, as an oracle: the least bound over α of the Gaussian mechanism's divergence
    α / 2z² a round (Canonne, Kamath and Steinke, 2020, Proposition 12)."""
    a = np.asarray(ORDERS, dtype=np.float64)
    divergence = rounds * a / (2 * multiplier**2)
    return float((divergence + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)).min())


@pytest.mark.parametrize(("sampling", "sensitivity"), [("poisson", 1), ("fixed", 2)])
def test_a_whole_cohort_against_the_oracle(sampling: str, sensitivity: int) -> None:
    """A device that is replaced changes the sum by twice the norm of an upload."""
    found = Releases(50, 50, sampling, 6.0).epsilon(7, 1e-5)  # type: ignore[arg-type]
    assert found == pytest.approx(whole_cohort(6.0 / sensitivity, 7, 1e-5), rel=1e-9)


def test_sampling_helps_and_rounds_cost() -> None:
    one, two = Releases(1000, 10, "poisson", 1.0), Releases(1000, 100, "poisson", 1.0)
    assert one.epsilon(10, 1e-5) < two.epsilon(10, 1e-5) < whole_cohort(1.0, 10, 1e-5)
    assert one.epsilon(10, 1e-5) < one.epsilon(11, 1e-5)
    assert Releases(1000, 100, "poisson", 3.0).epsilon(10, 1e-5) < Releases(1000, 100, "fixed", 3.0).epsilon(
        10, 1e-5
    )


def test_pruning_rates_are_a_release_of_their_own() -> None:
    """The sum of rates is asked for before the round of that number, so that the records of earlier rounds do
    not have it."""
    without = Releases(50, 50, "poisson", 6.0)
    rates = Releases(50, 50, "poisson", 6.0, rate_noise=3.0, rate_round=4)
    assert rates.epsilon(4, 1e-5) == without.epsilon(4, 1e-5)
    joint = (5 / 6.0**2 + 1 / 3.0**2) ** -0.5  # one Gaussian mechanism with the same divergences
    assert rates.epsilon(5, 1e-5) == pytest.approx(whole_cohort(joint, 1, 1e-5), rel=1e-9)


@pytest.mark.parametrize(
    ("sampling", "cohort", "epsilon", "rate_noise"),
    [
        ("poisson", 40, 0.5, None),
        ("poisson", 400, 8.0, 10.0),
        ("fixed", 400, 3.0, None),
        pytest.param("poisson", 40, 100.0, None, marks=pytest.mark.slow),
        pytest.param("fixed", 40, 3.0, None, marks=pytest.mark.slow),
    ],
)
def test_the_noise_of_a_target(sampling: str, cohort: int, epsilon: float, rate_noise: float | None) -> None:
    start = Releases(400, cohort, sampling, 1.0, rate_noise)  # type: ignore[arg-type]
    found = calibrated(start, 30, epsilon, 1e-5)
    assert 0.99 * epsilon <= found.epsilon(30, 1e-5) <= epsilon
    assert found.devices == 400


def test_a_target_that_no_noise_reaches() -> None:
    with pytest.raises(FeddumapError, match=r"privacy\.epsilon = 0.1 cannot be had .* raise privacy\.rate_n"):
        calibrated(Releases(40, 40, "poisson", 1.0, rate_noise=1.0), 3, 0.1, 1e-5)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    accounting._library.cache_clear()
    try:
        with pytest.raises(FeddumapError, match=r"pip install 'feddumap\[privacy\]'"):
            Releases(17, 3, "poisson", 1.0).epsilon(1, 1e-5)
    finally:
        accounting._library.cache_clear()
