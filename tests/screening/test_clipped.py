"""Norm clipping: the bound, its history, and what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from feddumap import run as api
from feddumap.core.messages import Upload
from feddumap.core.tensors import digest
from tests.conftest import small
from tests.support.methods import bits, outcome, resumed
from tests.support.screening import SIZE, merged, rule, updates, upload


def lengths(*norms: float, extra: bool = False) -> list[Upload]:
    unit = np.ones(SIZE) / np.sqrt(SIZE)
    other = np.ones(6) / np.sqrt(6)
    return [upload(k, norm * unit, 10 + k, norm * other if extra else ()) for k, norm in enumerate(norms)]


def test_the_first_round_is_clipped_by_its_own_median() -> None:
    some = lengths(1.0, 2.0, 3.0, 100.0, 2.0)
    screening = rule("clipped", multiple=1.25)
    found = updates(merged(screening, some).weights)
    factors = np.minimum(1, 2.5 / np.array([1, 2, 3, 100, 2]))
    vectors = np.array([updates(one.weights) for one in some])
    expected = np.average(factors[:, None] * vectors, axis=0, weights=[one.samples for one in some])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    kept, metrics = screening.end()
    assert metrics["clipped"] == pytest.approx({"2": 2.5 / 3, "3": 2.5 / 100}, rel=1e-5)
    assert metrics["clip_norm"] == pytest.approx(2.5, rel=1e-6)
    assert kept["norms/weights"].dtype == torch.float64
    assert kept["norms/weights"].tolist() == pytest.approx([2.0], rel=1e-6)


def test_later_rounds_use_the_median_of_ten_and_hold_one_upload_at_a_time() -> None:
    history = torch.tensor([1.0] * 4 + [4.0] * 6, dtype=torch.float64)
    screening = rule("clipped", {"norms/weights": history}, multiple=1.0)
    seen: list[int] = []

    def arriving() -> Iterator[Upload]:
        for one in lengths(1.0, 8.0, 2.0):
            seen.append(one.device)
            yield one

    admitted = screening.admit(arriving())
    first = next(admitted)
    assert seen == [0]
    assert np.linalg.norm(updates(first.weights)) == pytest.approx(1.0, rel=1e-6)
    second = next(admitted)
    assert seen == [0, 1]
    assert np.linalg.norm(updates(second.weights)) == pytest.approx(4.0, rel=1e-6)
    list(admitted)
    kept, metrics = screening.end()
    assert metrics["clipped"] == pytest.approx({"1": 0.5})
    assert kept["norms/weights"].tolist() == pytest.approx([1.0] * 3 + [4.0] * 6 + [2.0], rel=1e-6)


def test_what_comes_along_is_clipped_by_its_own_norm() -> None:
    some = lengths(1.0, 1.0, 1.0, extra=True)
    some.append(upload(3, np.ones(SIZE) / np.sqrt(SIZE), 10, np.full(6, 1e5)))
    screening = rule("clipped", multiple=1.0)
    *_, last = screening.admit(some)
    assert digest(last.weights) == digest(some[-1].weights)
    assert float(last.extra["c/fc.weight"].norm()) == pytest.approx(1.0, rel=1e-5)
    assert set(screening.end()[0]) == {"norms/weights", "norms/c"}


def test_uploads_within_the_bound_keep_their_bits() -> None:
    some = lengths(1.0, 1.1, 0.9)
    screening = rule("clipped")
    assert list(map(id, screening.admit(some))) == list(map(id, some))
    assert "clipped" not in screening.end()[1]


def test_two_workers_and_a_resume_change_no_bit(home: object, tmp_path: Path) -> None:
    """The norms of earlier rounds are part of the checkpoint."""
    rules = {"aggregate": {"name": "clipped", "multiple": 0.9}, "attack": {"name": "scaling", "share": 0.4}}
    whole = api.train(small(**rules))
    assert whole.state.steps["screening/norms/weights"].shape == (3,)
    assert all(record["clipped"] for record in whole.records)
    left, again = resumed(small(run={"workers": 2}, **rules), tmp_path / "run", 2)
    assert outcome(again) == outcome(whole)
    assert left != bits(whole)
    plain = api.train(small())
    assert bits(plain) != bits(whole)
