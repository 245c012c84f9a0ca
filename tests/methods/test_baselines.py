"""Methods beside the paper's own, each against its formula written out."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddumap import run as api
from feddumap.core.algorithm import Census, Context, RoundView, epochs_over
from feddumap.core.clock import PaperClock, Work
from feddumap.core.messages import CIFAR_INPUT, ServerState, Tensors
from feddumap.core.rng import stream
from feddumap.core.sampling import select
from feddumap.core.tensors import digest
from feddumap.methods.feddf import cosine, ensemble_distillation
from feddumap.methods.fedopt import adagrad, adam, fedopt, yogi
from feddumap.models import architecture, initialise, network
from feddumap.models.cost import macs, parameter_names
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.ranks import feature_ranks
from feddumap.system.determinism import deterministic
from feddumap.training.backends import Kernels, make_model
from feddumap.training.loop import fit
from feddumap.training.optimizers import adam as adam_rule
from feddumap.training.optimizers import proximal, sgd
from feddumap.training.samples import Samples, batches
from tests.conftest import both_kernels, small
from tests.support.oracles import Step, averaged, samples, sgd_oracle, taken, walk


@both_kernels
def test_fedprox_pulls_to_the_model_received(kernels: Kernels) -> None:
    """SGD in float64 on the loss with the proximal term written into it."""
    shape = architecture("lenet", 10)
    weights, mu, lr = initialise(shape, 3), 0.5, 0.05
    trained, plain, again = (make_model(shape, weights, kernels) for _ in range(3))
    with deterministic():
        for model, rule in ((trained, proximal(mu)), (plain, proximal(0.0))):
            fit(model, batches(samples(30), 2, 8, stream(1, "b"), augment=CIFAR_INPUT), rule, lr)
        fit(again, batches(samples(30), 2, 8, stream(1, "b"), augment=CIFAR_INPUT), sgd(), lr)
    assert digest(plain.weights()) == digest(again.weights())  # μ = 0 is FedAvg

    oracle = network(shape, weights).double()
    start = [parameter.detach().clone() for parameter in oracle.parameters()]
    for inputs, labels in batches(samples(30), 2, 8, stream(1, "b"), augment=CIFAR_INPUT):
        pull = sum(((w - w0) ** 2).sum() for w, w0 in zip(oracle.parameters(), start, strict=True))
        loss = F.cross_entropy(oracle(inputs.double()), labels) + mu / 2 * pull
        grads = torch.autograd.grad(loss, list(oracle.parameters()))
        for parameter, grad in zip(oracle.parameters(), grads, strict=True):
            parameter.data -= lr * grad
    for name, tensor in trained.weights().items():
        torch.testing.assert_close(tensor.double(), oracle.state_dict()[name], rtol=1e-4, atol=1e-6)
        assert not torch.equal(tensor, plain.weights()[name])


def view_of(state: ServerState) -> RoundView:
    census = Census(np.zeros(0, dtype=np.int64))
    return RoundView(Context(small(), samples(1), census, PaperClock(1.0)), state, 0.1, [])


@pytest.mark.parametrize(
    ("second", "rule"),
    [
        (adagrad, lambda v, d, b: v + d * d),
        (adam, lambda v, d, b: b * v + (1 - b) * d * d),
        (yogi, lambda v, d, b: v - (1 - b) * d * d * math.copysign(1, v - d * d)),
    ],
)
def test_fedopt_equals_algorithm_2_of_its_paper(second: Any, rule: Any) -> None:
    """One scalar followed by hand through three rounds."""
    shape = architecture("lenet", 10)
    state = ServerState(0, shape, initialise(shape, 1))
    lr, beta1, beta2, tau = 0.3, 0.8, 0.95, 0.02
    step = fedopt(second, lr, beta1, beta2, tau)
    steps = step.init(state)
    w, m, v = state.weights["fc1.bias"][3].item(), 0.0, tau**2
    for number in range(3):
        change = {"fc1.bias": torch.full((120,), [0.05, -0.2, 0.1][number])}
        reached = {**state.weights, "fc1.bias": state.weights["fc1.bias"] + change["fc1.bias"]}
        weights, steps, _ = step.apply(reached, steps, view_of(state))
        delta = [0.05, -0.2, 0.1][number]
        m = beta1 * m + (1 - beta1) * delta
        v = rule(v, delta, beta2)
        w = w + lr * m / (math.sqrt(v) + tau)
        assert weights["fc1.bias"][3].item() == pytest.approx(w, rel=1e-4, abs=1e-6)
        state = replace(state, round=number + 1, weights=weights)
    assert set(steps) == {f"{kind}/{name}" for kind in "mv" for name in parameter_names(shape)}


def test_fedopt_averages_what_is_no_parameter() -> None:
    shape = architecture("resnet18", 10)
    state = ServerState(0, shape, initialise(shape, 1))
    reached = {
        name: tensor + 1 if tensor.is_floating_point() else tensor + 3
        for name, tensor in state.weights.items()
    }
    step = fedopt(adam, 0.1, 0.9, 0.99, 0.001)
    weights, _, _ = step.apply(reached, step.init(state), view_of(state))
    for name in set(state.weights) - set(parameter_names(shape)):
        assert torch.equal(weights[name], reached[name]), name
        assert weights[name].dtype == state.weights[name].dtype
    assert not torch.equal(weights["stem.weight"], reached["stem.weight"])


def descend(run: api.Run, start: Tensors, data: Samples, rng: np.random.Generator, number: int) -> Tensors:
    """E epochs of SGD in double precision."""
    return walk(run, start, data, rng, number, lambda _, grad: grad)


def server_oracle(run: api.Run, start: Tensors, number: int) -> Tensors:
    """The server's own E epochs."""
    rng = stream(run.config.run.seed, "server-batches", number)
    return descend(run, start, taken(run, run.split.server), rng, number)


def remembering(v: Tensors, beta: float) -> tuple[Tensors, Step]:
    """m ← β m + (1 − β) g from m = v; the first result is m as it goes along."""
    m = {name: tensor.clone() for name, tensor in v.items()}

    def step(name: str, grad: torch.Tensor) -> torch.Tensor:
        m[name] = beta * m[name] + (1 - beta) * grad
        return m[name]

    return m, step


def assert_carried(run: api.Run, prefix: str, expected: Tensors) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(run.state.steps[prefix + name].double(), tensor, rtol=1e-3, atol=5e-6)


@pytest.mark.parametrize("method", ["fedda", "feddu-da"])
def test_fedda_shares_its_momentum(home: object, method: str) -> None:
    """w ← w − η · mean P_k with P_k = (w − w_k)/η, v ← mean v_k; with FedDU both go α of the server's way."""
    beta = 0.8
    settings = {"partition": "dirichlet", "size_spread": 0.8}
    run = api.start(small(method={"name": method, "momentum": beta}, data=settings, train={"rounds": 2}))
    names = parameter_names(run.state.architecture)
    w = {name: tensor.double() for name, tensor in run.state.weights.items()}
    v = {name: torch.zeros_like(w[name]) for name in names}
    rounds = iter(run)
    for number in range(2):
        lr = 0.05 * 0.99**number
        chosen = select(run.config, number)
        sizes, updates, buffers = [], [], []
        for device in chosen:
            m, step = remembering(v, beta)
            data, rng = taken(run, run.split.device(device)), stream(777, "batches", number, device)
            model = walk(run, w, data, rng, number, step)
            sizes.append(len(data))
            updates.append({name: (w[name] - model[name]) / lr for name in w})
            buffers.append(m)
        p = averaged(sizes, updates)
        w = {name: w[name] - lr * p[name] for name in w}
        v = averaged(sizes, buffers)
        next(rounds)
        if method == "feddu-da":
            alpha = run.records[number]["alpha"]
            assert alpha > 0.001
            m, step = remembering(v, beta)
            rng = stream(777, "server-batches", number)
            own = walk(run, w, taken(run, run.split.server), rng, number, step)
            w = {name: w[name] - lr * alpha * (w[name] - own[name]) / lr for name in w}
            v = {name: v[name] + alpha * (m[name] - v[name]) for name in v}
        assert_carried(run, "v/", v)
        for name, tensor in run.state.weights.items():
            torch.testing.assert_close(tensor.double(), w[name], rtol=1e-4, atol=2e-6)
    for record in run.records:  # twice the traffic both ways
        assert record["bytes_down"] == record["bytes_up"] == 3 * 2 * 4 * 15_626


def test_mime_lite_steps_with_a_frozen_momentum(home: object) -> None:
    """w_k ← w_k − η ((1 − β) g + β s); s ← β s + (1 − β) · the mean of the full gradients at w."""
    beta = 0.7
    run = api.start(small(method={"name": "mime-lite", "momentum": beta}, train={"rounds": 2}))
    names = parameter_names(run.state.architecture)
    w = {name: tensor.double() for name, tensor in run.state.weights.items()}
    s = {name: torch.zeros_like(w[name]) for name in names}
    rounds = iter(run)
    for number in range(2):
        sizes, models, gradients = [], [], []
        for device in select(run.config, number):
            data, rng = taken(run, run.split.device(device)), stream(777, "batches", number, device)
            models.append(
                walk(run, w, data, rng, number, lambda name, g, s=s: (1 - beta) * g + beta * s[name])
            )
            sizes.append(len(data))
            model = network(run.state.architecture, w).double()
            images = data.inputs.permute(0, 3, 1, 2).double() / 255
            grads = torch.autograd.grad(
                F.cross_entropy(model(images), data.targets), list(model.parameters())
            )
            gradients.append(dict(zip(names, grads, strict=True)))
        w = averaged(sizes, models)
        mean = averaged(sizes, gradients)
        s = {name: beta * s[name] + (1 - beta) * mean[name] for name in names}
        next(rounds)
        assert_carried(run, "s/", s)
        for name, tensor in run.state.weights.items():
            torch.testing.assert_close(tensor.double(), w[name], rtol=1e-4, atol=2e-6)
    for record in run.records:
        assert record["bytes_down"] == record["bytes_up"] == 3 * 2 * 4 * 15_626


@pytest.mark.parametrize("limit", [50, 2000])
def test_data_sharing_trains_on_the_union(home: object, limit: int) -> None:
    method = {"name": "data-sharing", "shared_samples": limit}
    run = api.start(small(method=method, train={"rounds": 2}))
    start, chosen, server = run.state.weights, select(run.config, 0), run.split.server
    given = min(limit, len(server))
    sets = []
    for device in chosen:
        shared = server
        if given < len(server):
            shared = np.sort(stream(777, "shared", device).choice(server, given, replace=False))
        sets.append(np.concatenate([run.split.device(device), shared]))
    models = [
        descend(run, start, taken(run, indices), stream(777, "batches", 0, device), 0)
        for device, indices in zip(chosen, sets, strict=True)
    ]
    rounds = iter(run)
    next(rounds)
    for name, tensor in run.state.weights.items():
        total = sum(len(indices) * model[name] for indices, model in zip(sets, models, strict=True))
        expected = total / sum(len(indices) for indices in sets)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-4, atol=1e-6)
    next(rounds)
    first, second = run.records
    assert first["samples"] == sum(len(run.split.device(device)) + given for device in chosen)
    # once, each of the six devices gets its images (3 × 32 × 32 bytes) and their labels
    assert first["bytes_down"] - second["bytes_down"] == 6 * given * (256 + 1)
    assert first["bytes_up"] == second["bytes_up"] == 3 * 4 * 15_626
    # the clock: as many times FedAvg's training as there are more samples
    own = sum(len(run.split.device(device)) for device in chosen)
    link = 3 * 4 * 15_626 / 2**20 * (1 / 6.25 + 1 / 12.5)
    assert first["clock"] == pytest.approx(1.3 * first["samples"] / own + link)
    charged = api.train(small(method={**method, "transfer_on_clock": True}, train={"rounds": 2}))
    transfer = 6 * given * (256 + 1) / 2 / 2**20 * (1 / 6.25 + 1 / 12.5)
    for mine, record in zip(charged.records, run.records, strict=True):
        assert mine["clock"] == pytest.approx(record["clock"] + transfer)


@pytest.mark.parametrize("percent", [1, 2, 5, 10, 20])
def test_data_sharing_on_the_papers_clock(percent: int) -> None:
    """In the paper's setting, 400 images a device and p of 40,000 on the server, s = 1 + min(p in %, 5)."""
    config = small(train={"epochs": 5})
    given = min(400 * percent, 2000)
    passes = epochs_over(np.full(10, 400), given, config)
    work = Work(1, 1, 0, 0, passes, np.full(10, 400 * 5))
    assert PaperClock(2.3).round(range(10), work).seconds == pytest.approx(2.3 * (1 + min(percent, 5)))


def test_hybrid_fl_averages_the_server_in(home: object) -> None:
    run = api.start(small(method={"name": "hybrid-fl"}, train={"rounds": 1}))
    start, chosen = run.state.weights, select(run.config, 0)
    models = [sgd_oracle(run, start, device, 0) for device in chosen] + [server_oracle(run, start, 0)]
    sizes = [len(run.split.device(device)) for device in chosen] + [len(run.split.server)]
    run.run()
    for name, tensor in run.state.weights.items():
        expected = sum(n * model[name] for n, model in zip(sizes, models, strict=True)) / sum(sizes)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-4, atol=1e-6)
    assert run.records[0]["samples"] == sum(sizes[:-1])  # the server is no device


def test_adam_equals_torchs_with_clipped_gradients() -> None:
    shape = architecture("lenet", 10)
    weights = initialise(shape, 3)
    trained = network(shape, weights).double()
    oracle = network(shape, weights).double()

    def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
        shown = batches(samples(60), 2, 8, stream(1, "b"), augment=None)
        return [(inputs.double(), labels) for inputs, labels in shown]

    clip = 1.0
    fit(trained, data(), adam_rule(clip), lambda step: cosine(step, 40), F.cross_entropy)
    optimiser = torch.optim.Adam(oracle.parameters(), lr=1e-3)
    clipped = 0
    for step, (inputs, labels) in enumerate(data()):
        optimiser.param_groups[0]["lr"] = 1e-3 * (1 + math.cos(math.pi * step / 40)) / 2
        optimiser.zero_grad()
        F.cross_entropy(oracle(inputs), labels).backward()
        clipped += float(nn.utils.clip_grad_norm_(oracle.parameters(), clip)) > clip
        optimiser.step()
    assert 0 < clipped < 16  # both branches
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, oracle.state_dict()[name], rtol=1e-5, atol=1e-8)


def test_feddf_teaches_the_mean_what_the_models_say(home: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round in float64: uniform mean, mean of logits, KL, Adam with cosine, best on validation."""
    feddf = import_module("feddumap.methods.feddf")
    monkeypatch.setattr(feddf, "CHECK_EVERY", 2)
    monkeypatch.setattr(feddf, "BATCH", 16)
    monkeypatch.setattr(feddf, "LEARNING_RATE", 0.01)
    run = api.start(small(method={"name": "feddf"}, train={"rounds": 1}))
    run._algorithm = replace(run._algorithm, aggregate=ensemble_distillation(max_steps=12, patience=6))
    shape, start, chosen = run.state.architecture, run.state.weights, select(run.config, 0)
    models = [sgd_oracle(run, start, device, 0) for device in chosen]
    mean = {name: sum(model[name] for model in models) / len(models) for name in start}
    data = run.dataset
    own = Samples.take(data.train_inputs, data.train_labels, run.split.server)
    order = stream(777, "distil-exam").permutation(len(own))
    exam, lessons = order[: round(len(own) / 10)], order[round(len(own) / 10) :]

    def outputs(weights: Tensors, indices: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            images = own.inputs[indices].permute(0, 3, 1, 2).double() / 255
            result: torch.Tensor = network(shape, weights).double()(images)
        return result

    teachers = sum(outputs(model, lessons) for model in models) / len(models)
    student = network(shape, mean).double()
    optimiser = torch.optim.Adam(student.parameters(), lr=0.01)
    rng, left = stream(777, "distil", 0), np.empty(0, dtype=np.int64)

    def grade() -> float:
        given = outputs(dict(student.state_dict()), exam).argmax(1)
        return float((given == own.targets[exam]).double().mean())

    best, top, improved, steps = dict(mean), grade(), 0, 0
    for step in range(1, 13):
        if not len(left):
            left = rng.permutation(len(lessons))
        batch, left = left[:16], left[16:]
        optimiser.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * (step - 1) / 12)) / 2
        images = own.inputs[lessons[batch]].permute(0, 3, 1, 2).double() / 255
        p, q = F.softmax(teachers[batch], 1), F.log_softmax(student(images), 1)
        optimiser.zero_grad()
        ((p * (p.log() - q)).sum() / len(batch)).backward()
        nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        optimiser.step()
        steps = step
        if step % 2 == 0:
            if grade() > top:
                best, top, improved = {k: v.clone() for k, v in student.state_dict().items()}, grade(), step
            if step - improved >= 6:
                break
    run.run()
    assert run.records[0]["distill_steps"] == steps
    assert run.records[0]["distill_accuracy"] == pytest.approx(top)
    for name, tensor in run.state.weights.items():
        torch.testing.assert_close(tensor.double(), best[name].double(), rtol=1e-2, atol=2e-4)


@pytest.mark.parametrize(
    ("alone", "with_update"), [("server-momentum", "feddu-sm"), ("device-momentum", "feddu-dm")]
)
def test_momentum_without_the_servers_data(home: object, alone: str, with_update: str) -> None:
    """C = 0 turns the dynamic update off; what remains is the momentum alone, bit for bit."""
    plain = api.train(small(method={"name": alone}))
    same = api.train(small(method={"name": with_update, "c": 0.0}))
    moved = api.train(small(method={"name": with_update}))
    assert digest(plain.state.weights) == digest(same.state.weights)
    assert digest(plain.state.weights) != digest(moved.state.weights)
    assert digest(plain.state.weights) != digest(api.train(small()).state.weights)


@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6, 0.8])
def test_hrank_removes_the_same_share_everywhere(home: object, rate: float) -> None:
    method = {"name": "hrank", "prune_round": 1, "prune_rate": rate}
    run = api.start(small(method=method, train={"rounds": 2}))
    rounds = iter(run)
    next(rounds)
    full = run.state.architecture
    data = run.dataset
    own = Samples.take(data.train_inputs, data.train_labels, run.split.server)
    with deterministic():
        model = make_model(full, run.state.weights, run.config.train.kernels)
        ranks = feature_ranks(model, prunable(full).layers, own, lambda *_: None)
    next(rounds)
    layers = run.records[1]["pruning"]["layers"]
    for name, width in full.channels:
        count = {0.2: {6: 1, 16: 3}, 0.4: {6: 2, 16: 6}, 0.6: {6: 3, 16: 9}, 0.8: {6: 4, 16: 12}}[rate][width]
        removed = layers[name]["removed"]
        assert layers[name]["kept"] == width - count == dict(run.state.architecture.channels)[name]
        kept = [rank for channel, rank in enumerate(ranks[name]) if channel not in removed]
        assert max(ranks[name][channel] for channel in removed) <= min(kept)
    assert run.records[1]["macs"] == macs(run.state.architecture) < run.records[0]["macs"]


def test_hrank_prunes_the_method_it_is_given(home: object) -> None:
    method = {"name": "hrank", "prune_round": 2, "base": "feddum", "device_momentum": 0.5}
    pruned = api.train(small(method=method))
    plain = api.train(small(method={"name": "feddum", "device_momentum": 0.5}))
    for number in range(2):
        one, two = pruned.records[number], plain.records[number]
        assert {**one, "wall": 0} == {**two, "wall": 0}
    assert pruned.records[2]["macs"] < plain.records[2]["macs"]
    for name, tensor in pruned.state.steps.items():
        assert tensor.shape == pruned.state.weights[name.rsplit("/", 1)[-1]].shape
