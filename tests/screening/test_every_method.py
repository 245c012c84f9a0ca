"""Every method under every rule is trained, or refused before training with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from feddumap import run as api
from feddumap.core.algorithm import Algorithm, Merged, RoundView
from feddumap.core.tensors import all_finite, digest, weighted_mean
from feddumap.errors import FeddumapError
from feddumap.methods.fedavg import fedavg
from feddumap.screening import RULES
from tests.support.methods import NAMES, config_of

pytestmark = pytest.mark.usefixtures("short_distillation")

REPLACE_THE_MEAN = ("median", "trimmed", "geometric-median")
REFUSED = {(name, rule) for name in ("fedkt", "fedkt-iter") for rule in RULES} | {
    ("feddf", rule) for rule in REPLACE_THE_MEAN
}
PAIRS = [(name, rule) for name in NAMES for rule in RULES]
SAMPLE = {("scaffold", "clipped"), ("fedda", "multi-krum"), ("mime-lite", "geometric-median")}
SAMPLE |= {("hybrid-fl", "median"), ("feddumap", "trust"), ("prunefl", "trimmed")}


def config(name: str, rule: str, **sections: dict[str, Any]) -> Any:
    aggregate = {"name": rule, "hostile": 0.1, "multiple": 0.5}  # so small that something is clipped
    return config_of(name, aggregate=aggregate, train={"rounds": 2, "cohort": 5}, **sections)


@pytest.mark.parametrize(
    ("name", "rule"),
    [pair if pair in SAMPLE | REFUSED else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS],
)
def test_trained_or_refused(home: object, name: str, rule: str) -> None:
    if (name, rule) in REFUSED:
        with pytest.raises(FeddumapError, match=f"'{rule}' cannot go with method.name = '{name}'.*choose"):
            api.start(config(name, rule))
        return
    run = api.train(config(name, rule, attack={"name": "sign-flip", "share": 0.25}))
    assert all_finite({**run.state.weights, **run.state.steps})
    plain = api.train(config(name, "mean", attack={"name": "sign-flip", "share": 0.25}))
    assert digest(run.state.weights) != digest(plain.state.weights)


def own_mean(uploads: Any, view: RoundView) -> Merged:
    return Merged(weighted_mean((upload.samples, upload.weights) for upload in uploads))


def combining(uploads: Any, view: RoundView) -> Merged:
    return Merged(view.combine((upload.weight, upload.weights) for upload in uploads))


def without_combine() -> Algorithm:
    """Takes a mean of its own."""
    return Algorithm(local=fedavg().local, aggregate=own_mean)


def with_combine() -> Algorithm:
    """Takes the mean that the configuration asks for."""
    return Algorithm(local=fedavg().local, aggregate=combining)


def test_a_method_of_ones_own_must_combine(home: object) -> None:
    """It is found in the rehearsal, before anything is written; rules that select go with any method."""
    own = {"method": {"name": f"{__name__}:without_combine"}}
    settings: Any = {"train": {"rounds": 1, "cohort": 5}}
    base = config("fedavg", "median").replace(**settings)
    with pytest.raises(FeddumapError, match=r"without_combine' does not call view\.combine"):
        api.start(base.model_copy(update={"method": base.method.model_validate(own["method"])}))
    for name, rule in (("without_combine", "multi-krum"), ("with_combine", "median")):
        method = base.method.model_validate({"name": f"{__name__}:{name}"})
        aggregate = base.aggregate.model_copy(update={"name": rule})
        run = api.train(base.model_copy(update={"method": method, "aggregate": aggregate}))
        assert all_finite(run.state.weights)


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        ({"name": "krum", "hostile": 0.4}, "needs at least 7 devices a round, but train.cohort = 5"),
        ({"name": "multi-krum", "hostile": 0.4}, "needs at least 7 devices"),
        ({"name": "trimmed", "trim": 0.1}, r"aggregate\.trim = 0\.1 of train\.cohort = 5 is no device"),
        ({"name": "average"}, r"aggregate\.name = 'average'"),
        ({"name": "trimmed", "trim": 0.5}, r"aggregate\.trim = 0\.5"),
        ({"name": "clipped", "multiple": 0.0}, r"aggregate\.multiple = 0\.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(home: object, aggregate: Any, message: str) -> None:
    with pytest.raises(FeddumapError, match=message):
        api.start(config_of("fedavg", aggregate=aggregate, train={"cohort": 5}))
