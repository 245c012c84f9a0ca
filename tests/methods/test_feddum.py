"""FedDUM: momentum on devices and server against the paper's formulas in double precision.

The oracles at the top also serve FedDU, which is FedDUM without momentum.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.algorithm import RoundView, chain
from feddumap.core.messages import CIFAR_INPUT, ServerState, Tensors
from feddumap.core.rng import stream
from feddumap.core.tensors import digest
from feddumap.data.sources.formats import DIGITS_INPUT
from feddumap.methods.feddu import DynamicUpdate, dynamic, server_update
from feddumap.methods.feddum import server_momentum
from feddumap.models import architecture, initialise, network
from feddumap.models.cost import parameter_names
from feddumap.training.backends import Kernels, make_model
from feddumap.training.loop import fit
from feddumap.training.optimizers import momentum, sgd
from feddumap.training.samples import Samples, batches
from tests.conftest import both_kernels
from tests.support.feddu import assert_near, descend, feddu_round, taken, view_of
from tests.support.methods import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def feddum(beta: float = 0.5, device: float = 0.9, **keys: Any) -> Config:
    return tiny(method={"name": "feddum", "server_momentum": beta, "device_momentum": device, **keys})


def test_feddum_equals_the_oracle(home: object) -> None:
    """g = w^(t−1) − FedDU's result, m ← β m + (1 − β) g, w^t = w^(t−1) − m; m begins as the first g."""
    beta, device, decay = 0.6, 0.8, 0.9
    run = api.start(feddum(beta, device, decay=decay))
    weights: Tensors = {name: tensor.double() for name, tensor in run.state.weights.items()}
    moving: Tensors = {}
    alphas = []
    for number in range(3):
        result, facts = feddu_round(run, weights, number, decay, device)
        alphas.append(facts["alpha"])
        for name, before in weights.items():
            g = before - result[name]
            moving[name] = beta * moving[name] + (1 - beta) * g if number else g
        weights = {name: before - moving[name] for name, before in weights.items()}
    run.run()
    assert min(alphas) > 0.001
    assert [record["alpha"] for record in run.records] == pytest.approx(alphas, rel=1e-9)
    assert_near(run.state.weights, weights)
    kept = {name.rpartition("/")[2]: tensor for name, tensor in run.state.steps.items()}
    assert_near(kept, moving)


def device_case() -> tuple[api.Run, Samples, float]:
    run = api.start(tiny(train={"epochs": 2}))
    return run, taken(run, run.split.device(0)[:50]), 0.05


@both_kernels
@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_a_device_averages_its_gradients_from_zero(home: object, beta: float, kernels: Kernels) -> None:
    run, data, lr = device_case()
    model = make_model(run.state.architecture, run.state.weights, kernels)
    assert (
        fit(
            model,
            batches(data, 2, 32, stream(1, "b"), augment=run.state.architecture.input),
            momentum(beta),
            lr,
        )
        == 4
    )
    assert_near(model.weights(), descend(run, run.state.weights, data, stream(1, "b"), lr, beta).weights)


@both_kernels
def test_the_first_step_is_not_that_of_torch(home: object, kernels: Kernels) -> None:
    """(1 − β') η g here; torch.optim.SGD with the same dampening takes η g."""
    run, data, lr = device_case()
    (first,) = list(batches(data, 1, 50, stream(1, "b"), augment=None))
    ours, plain = (make_model(run.state.architecture, run.state.weights, kernels) for _ in range(2))
    theirs = network(run.state.architecture, run.state.weights)
    fit(ours, [first], momentum(0.9), lr)
    fit(plain, [first], sgd(), lr)
    optimiser = torch.optim.SGD(theirs.parameters(), lr=lr, momentum=0.9, dampening=0.9)
    inputs, labels = first
    F.cross_entropy(theirs(inputs), labels).backward()
    optimiser.step()
    start = {name: tensor.double() for name, tensor in run.state.weights.items()}
    whole = {name: tensor.double() - start[name] for name, tensor in plain.weights().items()}
    assert_near({n: t.double() - start[n] for n, t in theirs.state_dict().items()}, whole, 1e-3, 1e-7)
    tenth = {name: 0.1 * step for name, step in whole.items()}
    assert_near({n: t.double() - start[n] for n, t in ours.weights().items()}, tenth, 1e-3, 1e-7)
    assert max(step.abs().max() for step in whole.values()) > 1e-4


@both_kernels
def test_without_momentum_a_device_does_plain_sgd_bit_for_bit(home: object, kernels: Kernels) -> None:
    run, data, lr = device_case()
    models = [make_model(run.state.architecture, run.state.weights, kernels) for _ in range(2)]
    for model, rule in zip(models, (momentum(0.0), sgd()), strict=True):
        fit(model, batches(data, 2, 8, stream(1, "b"), augment=CIFAR_INPUT), rule, lr)
    assert digest(models[0].weights()) == digest(models[1].weights())


def test_without_momentum_feddum_is_feddu(home: object) -> None:
    plain = api.train(tiny(method={"name": "feddu"}))
    for start in ("first", "zero"):
        run = api.train(feddum(0.0, 0.0, momentum_start=start))
        assert digest(run.state.weights) == digest(plain.state.weights)
        assert [record["alpha"] for record in run.records] == [record["alpha"] for record in plain.records]
    assert digest(api.train(feddum()).state.weights) != digest(run.state.weights)


def test_how_the_momentum_begins(home: object) -> None:
    """Round 1 of `first` is FedDU's; of `zero`, it goes the share 1 − β of the way."""
    one = {"rounds": 1}
    begin = api.start(tiny()).state.weights
    plain = api.train(tiny(method={"name": "feddu"}, train=one)).state.weights
    first = api.train(feddum(0.75, 0.0).replace(train=one)).state.weights
    assert_near(first, plain, rtol=0, atol=1e-7)
    zero = api.train(feddum(0.75, 0.0, momentum_start="zero").replace(train=one)).state.weights
    quarter = {name: tensor + (plain[name] - tensor) / 4 for name, tensor in begin.items()}
    assert_near(zero, quarter, rtol=0, atol=1e-6)
    assert (plain["conv1.weight"] - begin["conv1.weight"]).abs().max() > 1e-4


def normed(seed: int = 1) -> ServerState:
    """A state with batch norm."""
    shape = architecture("tests.support.own_model:make", 10, DIGITS_INPUT)
    return ServerState(0, shape, initialise(shape, seed))


def test_a_constant_gradient_becomes_the_step() -> None:
    """From m = 0 the k-th step is (1 − β^k) g; from the first g it is g at once."""
    state, beta = normed(), 0.8
    g = {name: torch.full_like(state.weights[name], 0.25) for name in parameter_names(state.architecture)}
    for start, missing in (("zero", 1.0), ("first", 0.0)):
        step = server_momentum(beta, start)  # type: ignore[arg-type]
        steps = step.init(state)
        now = state
        for k in range(1, 31):
            aimed = {name: w - g[name] if name in g else w for name, w in now.weights.items()}
            view = RoundView(None, now, 0.1, [])  # type: ignore[arg-type]
            moved, steps, said = step.apply(aimed, steps, view)
            expected = {name: (1 - missing * beta**k) * value for name, value in g.items()}
            assert_near({name: now.weights[name] - moved[name] for name in g}, expected, 1e-4, 1e-6)
            now = replace(now, weights=moved)
            assert said == {}


def test_batch_norm_statistics_take_no_momentum() -> None:
    state = normed()
    changed = {
        name: tensor + 1 if tensor.is_floating_point() else torch.tensor(7)
        for name, tensor in state.weights.items()
    }
    kept = {
        f"momentum/{name}": torch.ones_like(state.weights[name])
        for name in parameter_names(state.architecture)
    }
    view = RoundView(None, state, 0.1, [])  # type: ignore[arg-type]
    moved, steps, _ = server_momentum(0.5, "zero").apply(changed, kept, view)
    buffers = state.weights.keys() - set(parameter_names(state.architecture))
    assert buffers == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for name in buffers:
        assert torch.equal(moved[name], changed[name]), name
    assert moved["1.num_batches_tracked"].dtype == torch.int64
    assert steps.keys() == kept.keys()  # and none for a buffer
    for name in parameter_names(state.architecture):
        expected = state.weights[name]  # m = ½·1 + ½·(−1) = 0
        torch.testing.assert_close(moved[name], expected, rtol=0, atol=1e-6)


def test_counters_count_the_devices_steps_only(home: object) -> None:
    model = {"model": {"name": "tests.support.own_model:make"}, "clock": {"train_seconds": 1.0}}
    run = api.train(feddum().replace(**model, train={"rounds": 2}))
    assert all(record["tau_eff"] > 0 for record in run.records)
    counter = run.state.weights["1.num_batches_tracked"]
    per_round = [math.ceil(run.split.sizes[record["devices"][0]] / 32) for record in run.records]
    assert (counter.item(), counter.dtype) == (sum(per_round), torch.int64)
    assert not any("running" in name or "num_batches" in name for name in run.state.steps)


def test_momentum_goes_on_where_the_server_update_is_skipped(home: object) -> None:
    run = api.start(feddum())
    both = chain(
        server_update(dynamic(DynamicUpdate(c=0.0, decay=1.0))),
        server_momentum(0.5, "first"),
    )
    half = {name: tensor - 0.5 for name, tensor in run.state.weights.items()}
    known = {f"1/momentum/{name}": torch.full_like(w, 0.25) for name, w in half.items()}
    moved, steps, metrics = both.apply(half, known, view_of(run))
    assert metrics["skipped"] == "negligible"
    for name, before in run.state.weights.items():
        m = torch.full_like(before, 0.5 * 0.25 + 0.5 * 0.5)
        torch.testing.assert_close(steps[f"1/momentum/{name}"], m, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(moved[name], before - m, rtol=1e-5, atol=1e-6)
