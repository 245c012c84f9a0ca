"""Jensen-Shannon divergence: known answers, a plain float64 oracle, and the properties it must have."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddumap.data.label_mix import divergence, mix, non_iid_degree
from feddumap.errors import FeddumapError

CLASSES = 6
COUNTS = st.lists(st.integers(0, 500), min_size=CLASSES, max_size=CLASSES).filter(any)


def oracle(p: list[int], q: list[int]) -> float:
    """H(M) − ½ H(P) − ½ H(Q), the entropy form, term by term."""

    def entropy(values: list[float]) -> float:
        return -math.fsum(value * math.log2(value) for value in values if value > 0)

    left, right = [value / sum(p) for value in p], [value / sum(q) for value in q]
    middle = [(a + b) / 2 for a, b in zip(left, right, strict=True)]
    return entropy(middle) - entropy(left) / 2 - entropy(right) / 2


@pytest.mark.parametrize(("held", "shown"), [(1, None), (2, 0.6100), (5, 0.3113), (10, 0.0)])
def test_uniform_over_some_of_ten_classes(held: int, shown: float | None) -> None:
    # M is (1/held + 1/10)/2 on the held classes and 1/20 on the others, where only Q has mass
    middle = (1 / held + 0.1) / 2
    expected = 0.5 * math.log2(1 / held / middle) + 0.5 * (
        held * 0.1 * math.log2(0.1 / middle) + (10 - held) * 0.1 * math.log2(0.1 / 0.05)
    )
    value = float(divergence(np.arange(10) < held, np.ones(10)))
    assert value == pytest.approx(expected, abs=1e-12)
    assert shown is None or round(value, 4) == shown


@given(COUNTS, COUNTS)
def test_agrees_with_the_entropy_form(p: list[int], q: list[int]) -> None:
    assert float(divergence(p, q)) == pytest.approx(oracle(p, q), abs=1e-12)


@given(COUNTS, COUNTS)
def test_bounded_symmetric_and_zero_only_for_equal_mixes(p: list[int], q: list[int]) -> None:
    value = float(divergence(p, q))
    assert 0 <= value <= 1
    assert value == float(divergence(q, p))
    equal = all(a * sum(q) == b * sum(p) for a, b in zip(p, q, strict=True))
    assert (value == 0) == equal


@given(COUNTS, COUNTS, st.integers(1, 1000))
def test_only_the_mix_matters(p: list[int], q: list[int], factor: int) -> None:
    scaled = [factor * value for value in p]
    assert float(divergence(scaled, q)) == float(divergence(p, q))
    assert float(divergence(mix(p), q)) == pytest.approx(float(divergence(p, q)), abs=1e-12)


def test_disjoint_mixes_are_one_apart() -> None:
    assert float(divergence([3, 1, 0, 0], [0, 0, 9, 2])) == 1.0


@pytest.mark.filterwarnings("error")
def test_smallest_numbers_give_no_warning_and_no_nan() -> None:
    tiny = np.nextafter(0, 1)
    assert float(divergence([1.0, tiny], [1.0, 0.0])) == 0.0
    assert float(divergence([tiny, 0.0], [0.0, tiny])) == 1.0


@given(st.lists(COUNTS, min_size=1, max_size=5), COUNTS)
def test_rows_of_a_matrix_are_compared_one_by_one(rows: list[list[int]], q: list[int]) -> None:
    expected = [float(divergence(row, q)) for row in rows]
    assert divergence(rows, q).shape == (len(rows),)
    np.testing.assert_allclose(divergence(rows, q), expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(divergence(q, rows), expected, rtol=0, atol=1e-15)


def test_a_group_counts_by_images_not_by_devices() -> None:
    counts = np.array([[90, 0], [0, 10], [5, 95]])
    assert non_iid_degree(counts[:2], counts) == float(divergence([90, 10], [95, 105]))
    assert non_iid_degree(counts, counts) == 0.0
    assert non_iid_degree(counts[0], [1, 1]) == float(divergence([1, 0], [1, 1]))


@pytest.mark.parametrize("bad", [[0, 0], [[1, 2], [0, 0]], [1, -1], [1, math.nan], [1, math.inf], 3])
def test_counts_without_a_mix_are_refused(bad: object) -> None:
    with pytest.raises(FeddumapError, match="label counts"):
        mix(bad)  # type: ignore[arg-type]
