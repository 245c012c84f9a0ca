"""FedDU: the server's part against the paper's formulas in double precision, and its invariants."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.algorithm import Census, ServerStep
from feddumap.core.rng import stream
from feddumap.core.sampling import select
from feddumap.core.tensors import digest
from feddumap.methods.feddu import (
    DECAYS,
    EPSILON,
    NEGLIGIBLE,
    DynamicUpdate,
    degree_of_devices,
    divide,
    dynamic,
    effective_share,
    exploded,
    interpolate,
    never_acts,
    server_update,
    static,
)
from feddumap.training.samples import Samples
from tests.support.feddu import assert_near, descend, feddu_round, measure, taken, view_of
from tests.support.methods import outcome, resumed, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def feddu(**keys: Any) -> Config:
    return tiny(method={"name": "feddu", **keys})


def test_feddu_equals_the_oracle(home: object) -> None:
    decay = 0.7
    data = {"partition": "dirichlet", "size_spread": 0.5}
    train = {"rounds": 2, "epochs": 3, "batch": 7, "lr": 0.1}
    run = api.start(feddu(decay=decay).replace(data=data, train=train, run={"seed": 1}))
    assert len(run.split.server) % run.config.train.batch  # τ has a broken batch in each epoch
    weights, expected = run.state.weights, []
    accuracies = {measure(run, weights, taken(run, run.split.server))[0]}
    for number in range(2):
        weights, facts = feddu_round(run, weights, number, decay)
        expected.append(facts)
    run.run()
    assert_near(run.state.weights, weights)
    for record, facts in zip(run.records, expected, strict=True):
        assert {name: record[name] for name in facts} == pytest.approx(facts, rel=1e-9)
        assert "skipped" not in record
    accuracies |= {facts["server_accuracy"] for facts in expected}
    assert len(accuracies) == 3  # so that it matters which model was measured


def test_25_images_in_batches_of_10_for_2_epochs_are_6_steps(home: object) -> None:
    run = api.start(feddu().replace(train={"batch": 10, "epochs": 2}))
    view = view_of(run, server=taken(run, run.split.server[:25]))
    for rule in (dynamic(DynamicUpdate(decay=0.9)), static(3)):
        _, _, metrics = server_update(rule).apply(run.state.weights, {}, view)
        assert metrics["tau_eff"] / metrics["alpha"] == pytest.approx(6)
    assert metrics["alpha"] == 0.5  # three effective steps of six


UNIT = st.floats(0, 1)
SIZE = st.integers(1, 100_000)


@settings(max_examples=200, deadline=None)
@given(UNIT, UNIT, SIZE, SIZE, UNIT, UNIT, st.floats(0, 5), UNIT)
def test_share_is_bounded_and_monotone(
    low: float, high: float, n0: int, n: int, d0: float, d: float, c: float, other: float
) -> None:
    def share(accuracy: float, d0: float = d0, d: float = d) -> float:
        return effective_share(accuracy, (n0, d0), (n, d), c, "one_minus")

    low, high = sorted((low, high))
    assert 0 <= share(high) <= share(low) <= c
    assert share(1.0) == 0
    small_d, large_d = sorted((d, other))
    assert share(low, d=small_d) <= share(low, d=large_d) + 1e-12
    small_d0, large_d0 = sorted((d0, other))
    assert share(low, d0=small_d0) >= share(low, d0=large_d0) - 1e-12
    assert share(low, 0.0, 0.0) == pytest.approx((1 - low) * c * n0 / (n0 + n))
    inverse = effective_share(low, (n0, d0), (n, d), c, "inverse")
    assert inverse * (1 - low) == pytest.approx(share(low) / (low + EPSILON))


def test_share_really_moves() -> None:
    middle = effective_share(0.5, (100, 0.3), (300, 0.1), 1.0, "one_minus")
    assert middle == pytest.approx(0.5 * 100 * 0.1 / (100 * 0.1 + 300 * 0.3))
    assert effective_share(0.6, (100, 0.3), (300, 0.1), 1.0, "one_minus") < middle
    assert effective_share(0.5, (100, 0.3), (300, 0.2), 1.0, "one_minus") > middle
    assert effective_share(0.5, (100, 0.4), (300, 0.1), 1.0, "one_minus") < middle
    assert effective_share(0.5, (100, 0.3), (300, 0.1), 2.0, "one_minus") == pytest.approx(2 * middle)


@pytest.mark.parametrize(("c", "sign"), [(0.0, 0), (1e-3, 1)])
def test_a_negligible_share_is_skipped_and_said(home: object, c: float, sign: int) -> None:
    """C = 0 is FedAvg, bit for bit; so is any α of at most 0.001."""
    run = api.train(feddu(c=c))
    assert digest(run.state.weights) == digest(api.train(tiny()).state.weights)
    for record in run.records:
        assert (record["skipped"], record["tau_eff"]) == ("negligible", 0.0)
        assert np.sign(record["alpha"]) == sign
        assert record["alpha"] <= 0.001


def test_a_perfect_model_is_left_alone(home: object) -> None:
    """acc = 1 ⇒ α = 0 ⇒ w = w½: all the server's images are of one class, and the output says so."""
    run = api.start(feddu())
    everything = taken(run, run.split.server)
    label = int(everything.targets[0])
    same = everything.targets == label
    weights = dict(run.state.weights)
    weights["fc3.weight"] = torch.zeros_like(weights["fc3.weight"])
    weights["fc3.bias"] = F.one_hot(torch.tensor(label), 10).float()
    view = view_of(run, server=everything[same])
    moved, _, metrics = server_update(dynamic(DynamicUpdate(decay=1.0))).apply(weights, {}, view)
    assert (metrics["server_accuracy"], metrics["alpha"]) == (1.0, 0.0)
    assert digest(moved) == digest(weights)
    _, _, metrics = server_update(dynamic(DynamicUpdate(decay=1.0, accuracy_weight="inverse"))).apply(
        weights, {}, view
    )
    assert metrics["alpha"] > 0


def test_decay_and_accuracy_weight_change_alpha(home: object) -> None:
    run = api.start(feddu())

    def alpha(decay: float, number: int, weight: Any = "one_minus") -> float:
        step = server_update(dynamic(DynamicUpdate(decay=decay, accuracy_weight=weight)))
        return float(step.apply(run.state.weights, {}, view_of(run, number))[2]["alpha"])

    first = alpha(0.9, 0)
    assert first == alpha(0.5, 0) > 0.01
    assert alpha(0.9, 3) == pytest.approx(first * 0.9**3)
    assert alpha(1.0, 3) == first
    accuracy, _ = measure(run, run.state.weights, taken(run, run.split.server))
    assert alpha(0.9, 0, "inverse") == pytest.approx(first / (1 - accuracy) / (accuracy + EPSILON))


@pytest.mark.parametrize("steps", [3, "full"])
def test_feddu_s_goes_a_fixed_way(home: object, steps: Any) -> None:
    """w = w½ − τ_eff η ḡ0 with τ_eff as told; `full` ends where the server's copy does."""
    run = api.train(tiny(method={"name": "feddu-s", "effective_steps": steps}, train={"rounds": 1}))
    tau = math.ceil(len(run.split.server) / 32)
    effective = tau if steps == "full" else steps
    assert run.records[0]["alpha"] * tau == run.records[0]["tau_eff"] == effective
    assert "degree_server" not in run.records[0]
    half = api.train(tiny(train={"rounds": 1})).state.weights
    path = descend(run, half, taken(run, run.split.server), stream(777, "server-batches", 0), 0.05)
    expected = {n: w.double() - effective * 0.05 * path.mean_gradient[n] for n, w in half.items()}
    assert_near(run.state.weights, expected)
    if steps == "full":
        assert run.records[0]["alpha"] == 1
        assert_near(run.state.weights, path.weights)


def test_feddu_s_never_goes_beyond_the_servers_model(home: object) -> None:
    run = api.train(tiny(method={"name": "feddu-s", "effective_steps": 10**6}, train={"rounds": 1}))
    assert run.records[0]["alpha"] == 1
    assert run.records[0]["tau_eff"] == math.ceil(len(run.split.server) / 32)


@pytest.mark.parametrize("lr", [50.0, 1e30])  # a loss out of all bounds, and one that is not finite
@pytest.mark.parametrize(
    "step",
    [
        server_update(static("full")),
        server_update(dynamic(DynamicUpdate(decay=1.0, accuracy_weight="inverse"))),
    ],
)
def test_a_step_that_explodes_is_taken_back_and_said(home: object, step: ServerStep, lr: float) -> None:
    run = api.start(feddu().replace(run={"seed": 1}))
    moved, _, metrics = step.apply(run.state.weights, {}, view_of(run, lr=lr))
    assert digest(moved) == digest(run.state.weights)
    assert (metrics["skipped"], metrics["tau_eff"]) == ("exploded", 0.0)
    assert metrics["alpha"] > 0
    calm, _, metrics = step.apply(run.state.weights, {}, view_of(run))
    assert digest(calm) != digest(run.state.weights)
    assert "skipped" not in metrics


def test_when_a_loss_has_exploded() -> None:
    guess = math.log(10)
    assert not exploded(0.1, 2 * guess, 10)  # no worse than twice guessing
    assert exploded(0.1, 2.01 * guess, 10)
    assert not exploded(5.0, 9.9, 10)
    assert exploded(5.0, 10.1, 10)
    assert exploded(5.0, math.nan, 10)
    assert exploded(math.inf, math.inf, 10)


def test_degrees_of_zero_give_the_share_of_sizes(home: object) -> None:
    """IID in every respect: D' = D0 = 0, and α = (1 − acc) n0 / (n0 + n')."""
    run = api.start(feddu())
    view = view_of(run)
    mix = np.bincount(view.context.server.targets.numpy(), minlength=10)
    census = Census(run.split.sizes, np.tile(mix, (20, 1)))
    view = replace(view, context=replace(view.context, census=census))
    _, _, metrics = server_update(dynamic(DynamicUpdate(decay=1.0))).apply(run.state.weights, {}, view)
    assert metrics["degree_devices"] == metrics["degree_server"] == 0
    n0, n = len(run.split.server), int(run.split.sizes[:3].sum())
    assert metrics["alpha"] == pytest.approx((1 - metrics["server_accuracy"]) * n0 / (n0 + n))


def test_interpolation_spares_counters() -> None:
    start = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    end = {"w": torch.tensor([3.0, 0.0]), "n": torch.tensor(9)}
    quarter = interpolate(start, end, 0.25)
    assert quarter["w"].tolist() == [1.5, 1.5]
    assert (quarter["n"].item(), quarter["n"].dtype) == (3, torch.int64)


HELD_OUT = server_update(dynamic(DynamicUpdate(decay="held-out")), hold_out=True)


def test_a_fifth_is_held_out_for_good(home: object) -> None:
    run = api.start(feddu())
    server = Samples(torch.arange(120), torch.arange(120) % 10)
    kept, out = divide(server, 777, True)
    assert (len(kept), len(out)) == (96, 24)
    assert sorted([*kept.inputs.tolist(), *out.inputs.tolist()]) == list(range(120))
    assert (kept.targets == kept.inputs % 10).all()
    assert divide(server, 777, True)[1].inputs.tolist() == out.inputs.tolist()
    assert divide(server, 778, True)[1].inputs.tolist() != out.inputs.tolist()
    assert divide(server, 777, False) == (server, server)

    # what is held out trains nothing: in round 0, where all decays agree, anything may stand there
    server = taken(run, run.split.server)
    images, labels = server.inputs.clone(), server.targets.clone()
    where = divide(Samples(torch.arange(len(server)), server.targets), 777, True)[1].inputs
    images[where], labels[where] = 255 - images[where], 9 - labels[where]
    steps = HELD_OUT.init(run.state)
    one, losses, metrics = HELD_OUT.apply(run.state.weights, steps, view_of(run))
    two, other, same = HELD_OUT.apply(run.state.weights, steps, view_of(run, server=Samples(images, labels)))
    assert (digest(one), metrics) == (digest(two), same)
    assert digest(losses) != digest(other)
    assert digest(one) != digest(run.state.weights)


@pytest.mark.parametrize("known", [(0.0, 0.0, 0.0, 0.0), (0.5, 0.0, 0.5, 0.5), (9.0, 9.0, 0.1, 9.0)])
def test_the_decay_with_the_lowest_summed_loss_is_chosen(home: object, known: tuple[float, ...]) -> None:
    run = api.start(feddu())
    number, weights = 6, run.state.weights
    view = view_of(run, number)
    kept, out = divide(view.context.server, 777, True)
    before = torch.tensor(known, dtype=torch.float64)
    moved, after, metrics = HELD_OUT.apply(weights, {"losses": before}, view)
    path = descend(run, weights, kept, stream(777, "server-batches", number), 0.05)
    step = server_update(dynamic(DynamicUpdate(decay=1.0)))
    share = step.apply(weights, {}, view_of(run, number, server=kept))[2]["alpha"]
    losses, ends = [], []
    for decay in DECAYS:
        alpha = share * decay**number
        ends.append({n: w.double() + alpha * (path.weights[n] - w.double()) for n, w in weights.items()})
        losses.append(measure(run, ends[-1], out)[1])
    sums = [a + b for a, b in zip(known, losses, strict=True)]
    choice = sums.index(min(sums))
    assert after["losses"].tolist() == pytest.approx(sums, rel=1e-5)
    assert metrics["decay"] == DECAYS[choice]
    assert metrics["alpha"] == pytest.approx(share * DECAYS[choice] ** number)
    assert_near(moved, ends[choice])


def test_an_explosion_leaves_the_choice_of_decay_intact(home: object) -> None:
    run = api.start(feddu())
    known = {"losses": torch.tensor([3.0, 2.0, 1.0, 2.0], dtype=torch.float64)}
    _, steps, metrics = HELD_OUT.apply(run.state.weights, known, view_of(run, 2, lr=1e30))
    assert metrics["skipped"] == "exploded"
    assert steps["losses"].isfinite().all()
    _, _, metrics = HELD_OUT.apply(run.state.weights, steps, view_of(run, 3))
    assert metrics["decay"] == DECAYS[2]


def test_held_out_survives_a_resume_and_sees_no_test_data(home: object, tmp_path: Path) -> None:
    config = feddu(decay="held-out").replace(train={"rounds": 4})
    whole = api.train(config)
    assert all(record["decay"] in DECAYS for record in whole.records)
    assert (whole.state.steps["losses"] > 0).all()
    assert outcome(resumed(config, tmp_path / "run", 2)[1]) == outcome(whole)
    blind = api.start(config)
    blind.dataset = replace(blind.dataset, test_labels=(blind.dataset.test_labels + 1) % 10)
    assert digest(blind.run().state.weights) == digest(whole.state.weights)


def test_the_degree_of_each_device_stays_positive_when_all_take_part() -> None:
    """D' = Σ n_k JS(P_k, P) / Σ n_k, by an oracle in float64; the cohort's own degree is 0 then."""
    counts = np.array([[30, 10, 0], [0, 5, 5], [8, 8, 84]], dtype=np.float64)

    def entropy(mix: np.ndarray) -> float:
        return -sum(p * math.log2(p) for p in mix if p > 0)

    def js(a: np.ndarray, b: np.ndarray) -> float:
        return entropy((a + b) / 2) - (entropy(a) + entropy(b)) / 2

    everyone = counts.sum(axis=0) / counts.sum()
    own = [js(row / row.sum(), everyone) for row in counts]
    expected = sum(row.sum() * degree for row, degree in zip(counts, own, strict=True)) / counts.sum()
    assert degree_of_devices(counts, [0, 1, 2], "device") == pytest.approx(expected, rel=1e-12)
    assert degree_of_devices(counts, [1], "device") == pytest.approx(own[1], rel=1e-12)
    assert degree_of_devices(counts, [1], "cohort") == pytest.approx(own[1], rel=1e-12)
    assert degree_of_devices(counts, [0, 1, 2], "cohort") == pytest.approx(0, abs=1e-12)


def test_whether_it_can_act_is_asked_of_the_devices_that_are_there(home: object) -> None:
    config = feddu().replace(train={"cohort": 1, "rounds": 4})
    run = api.start(config)
    context = view_of(run).context
    labels = context.census.labels
    assert labels is not None
    first, second = (select(config, number)[0] for number in (0, 1))
    assert first != second
    there = np.where(np.arange(len(labels))[:, None] == first, 0, labels)
    census = Census(there.sum(axis=1), there, {first: "not there"})
    assert never_acts(DynamicUpdate())(replace(context, census=census)) == []
    nobody = Census(there.sum(axis=1), there, dict.fromkeys(range(len(labels)), "not there"))
    assert "α is at most 0" in never_acts(DynamicUpdate())(replace(context, census=nobody))[0]


@pytest.mark.parametrize(
    ("keys", "cohort", "said"),
    [
        ({}, 20, r"the server's data is never used: α is at most .*train.cohort = 20 of 20.*method.degree"),
        ({}, 5, None),
        ({"degree": "device"}, 20, None),
        ({"c": 0.0}, 5, r"never used: α is at most 0, as method.c = 0"),
    ],
)
def test_a_server_update_that_can_never_act_is_said(
    home: object, keys: dict[str, Any], cohort: int, said: str | None
) -> None:
    heard: list[str] = []
    config = feddu(**keys).replace(train={"cohort": cohort, "rounds": 1})
    run = api.start(config, say=heard.append)
    record = next(iter(run))
    never = [line for line in heard if "never used" in line]
    assert bool(never) == (said is not None) == (record["alpha"] <= NEGLIGIBLE)
    if said is not None:
        assert re.search(said, never[0])
