"""What holds for every rule of [aggregate], on small vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from feddumap.core.tensors import digest
from feddumap.screening import RULES
from tests.support.screening import SIZE, START, merged, rule, updates, upload

NAMES = [name for name in RULES if name != "trust"]  # which needs a network: test_trust.py
every = pytest.mark.parametrize("name", NAMES)


def honest(count: int, seed: int = 0, extra: bool = False) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        upload(k, rng.normal(1, 0.2, SIZE), int(rng.integers(5, 50)), rng.normal(size=6) if extra else ())
        for k in range(count)
    ]


@every
def test_one_upload_is_what_comes_out(name: str) -> None:
    (alone,) = honest(1, extra=True)
    found = merged(rule(name), [alone])
    assert digest(found.weights) == digest(alone.weights)
    assert digest(found.extra) == digest(alone.extra)


@every
def test_equal_uploads_give_that_upload(name: str) -> None:
    update = np.random.default_rng(1).normal(size=SIZE)
    found = merged(rule(name), [upload(k, update, 5 + k) for k in range(7)])
    assert torch.equal(found.weights["fc.weight"], upload(0, update).weights["fc.weight"])


@every
def test_the_order_of_devices_does_not_matter(name: str) -> None:
    uploads = honest(9, seed=2, extra=True)
    one, other = merged(rule(name), uploads), merged(rule(name), uploads[::-1])
    np.testing.assert_allclose(updates(one.weights), updates(other.weights), rtol=0, atol=1e-7)
    torch.testing.assert_close(one.extra["c/fc.weight"], other.extra["c/fc.weight"], rtol=0, atol=1e-7)


@every
def test_counters_are_one_of_those_received(name: str) -> None:
    count = merged(rule(name), honest(4)).weights["bn.count"]
    assert count.dtype == torch.int64
    assert count.item() in range(10, 14)


@every
@pytest.mark.parametrize("size", [1e3, 1e30])
def test_two_hostile_uploads_of_ten_move_the_model_little(name: str, size: float) -> None:
    """Weights and what comes along: the mean is moved by as much as the hostile devices want."""
    good = honest(8, seed=3, extra=True)
    bad = [upload(k, np.full(SIZE, size), 20, np.full(6, -size)) for k in (8, 9)]
    found, without = merged(rule(name), [*good, *bad]), merged(rule(name), good)
    reach = max(np.linalg.norm(updates(one.weights)) for one in good)
    assert np.linalg.norm(updates(found.weights) - updates(without.weights)) < 1.5 * reach
    reach = max(float(one.extra["c/fc.weight"].norm()) for one in good)
    difference = found.extra["c/fc.weight"] - without.extra["c/fc.weight"]
    assert float(difference.norm()) < 1.5 * reach


@pytest.mark.parametrize("name", ["median", "trimmed"])
def test_every_coordinate_stays_in_the_honest_range(name: str) -> None:
    good = honest(8, seed=4)
    values = np.array([updates(one.weights) for one in good])
    for first, second in ((1e9, -1e9), (1e9, 1e9), (-1e9, -1e9)):
        bad = [upload(8, np.full(SIZE, first)), upload(9, np.full(SIZE, second))]
        found = updates(merged(rule(name), [*good, *bad]).weights)
        assert (values.min(axis=0) <= found).all()
        assert (found <= values.max(axis=0)).all()


@pytest.mark.parametrize("name", ["median", "trimmed", "geometric-median"])
def test_a_method_that_does_not_combine_is_refused(name: str) -> None:
    screening = rule(name)
    list(screening.admit(honest(3)))
    with pytest.raises(Exception, match=r"does not call view\.combine: call it"):
        screening.end()
    screening = rule(name)
    merged(screening, honest(5))
    assert screening.end() == ({}, {})


def test_batch_norm_is_part_of_an_update() -> None:
    """A hostile running mean alone is a long update."""
    good = honest(5)
    bad = upload(5, [0] * 6 + [1e4, 1e4])
    found = merged(rule("clipped"), [*good, bad])
    assert float((found.weights["bn.running_mean"] - START["bn.running_mean"]).abs().max()) < 10
