"""PruneFL: the adjustment against an obvious one, what devices report, and the first mask."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from math import floor
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
from feddumap.core.clock import PaperClock, Work
from feddumap.core.messages import Answer, Tensors
from feddumap.core.rng import stream
from feddumap.core.sampling import select
from feddumap.core.tensors import digest
from feddumap.data.sources.formats import DIGITS_INPUT
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.device.state import InMemoryStore
from feddumap.engine.local import Evaluator, LocalCohort
from feddumap.engine.rounds import broadcast_of
from feddumap.errors import FeddumapError
from feddumap.methods import compose
from feddumap.methods.prunefl import Search, adjustment, round_costs, unpacked
from feddumap.models import architecture, initialise, network
from feddumap.pruning.adjustment import Costs, adjust, adjustable_share, change_mask, weight_costs
from feddumap.pruning.masks import mask_tensors
from feddumap.system.determinism import deterministic
from feddumap.training.backends import Kernels, make_model
from feddumap.training.evaluation import Score
from feddumap.training.samples import batches
from tests.conftest import both_kernels, small
from tests.support.oracles import averaged, samples, taken, walk
from tests.support.runs import slow_cohort

FULL = 15_626  # LeNet's parameters
SIZES = {f"{layer}.weight": size for layer, size in zip(
    ("conv1", "conv2", "fc1", "fc2", "fc3"), (150, 2400, 1920, 10_080, 840), strict=True)}  # fmt: skip
BITMAP = 19 + 300 + 240 + 1260 + 105  # ⌈n/8⌉ of these


def config(adjust_every: int = 2, first_passes: int = 20, rounds: int = 4, **keys: Any) -> Config:
    method = {"name": "prunefl", "adjust_every": adjust_every, "first_passes": first_passes, **keys}
    data = {"partition": "dirichlet", "size_spread": 0.5}
    return small(method=method, data=data, train={"rounds": rounds})


def obvious(w: Tensors, mask: Tensors, squares: Tensors, costs: Costs, share: Any, number: Any) -> Tensors:
    """The best of the open weights again and again, while it is better than what there is; `number` is the
    arithmetic (Fraction is exact)."""
    g = {name: [number(v) for v in tensor.reshape(-1).tolist()] for name, tensor in squares.items()}
    stays = {name: used.reshape(-1).tolist() for name, used in mask.items()}
    for name, used in stays.items():
        ranked = sorted((abs(float(v)), i) for i, v in enumerate(w[name].reshape(-1)) if used[i])
        for _, i in ranked[: floor(share * len(ranked))]:
            used[i] = False
    places = [(name, i) for name in mask for i in range(len(stays[name]))]
    n = sum((sum(g[name], number(0)) for name in squares if name not in mask), number(0))
    n += sum((g[name][i] for name, i in places if stays[name][i]), number(0))
    t = costs.fixed + sum(costs.weight[name] * sum(stays[name]) for name in mask)
    candidates = [(g[name][i] / costs.weight[name], name, i) for name, i in places if not stays[name][i]]
    for worth, name, i in sorted(candidates, key=lambda candidate: -candidate[0]):
        if not worth > n / t:
            break
        n, t = n + g[name][i], t + costs.weight[name]
        stays[name][i] = True
    return {name: torch.tensor(used).reshape(mask[name].shape) for name, used in stays.items()}


@settings(max_examples=200)
@given(st.data())
def test_adjust_equals_the_obvious(data: st.DataObject) -> None:
    """Small whole numbers, so that floats are exact and there are many ties."""
    weights, mask, squares, prices = {}, {}, {}, {}
    for name in ("a", "b", "c")[: data.draw(st.integers(1, 3))]:
        size = data.draw(st.integers(1, 9))

        def numbers(low: int, high: int, size: int = size) -> torch.Tensor:
            return torch.tensor(data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size)))

        weights[name], squares[name] = numbers(-4, 4).float(), numbers(0, 12).float()
        mask[name], prices[name] = numbers(0, 1).bool(), data.draw(st.integers(1, 6))
    squares["bias"] = torch.tensor([float(data.draw(st.integers(0, 9)))])
    share = Fraction(data.draw(st.integers(0, 8)), 8)
    costs = Costs(data.draw(st.integers(1, 20)), prices)
    got = adjust(weights, mask, squares, costs, float(share))
    expected = obvious(weights, mask, squares, costs, share, Fraction)
    assert got.keys() == mask.keys()
    for name, kept in got.items():
        assert kept.tolist() == expected[name].tolist(), name
        assert not bool((kept & ~mask[name] & (squares[name] == 0)).any())  # what gains nothing stays away
    scaled = adjust(weights, mask, {n: 32 * t for n, t in squares.items()}, costs, float(share))
    assert all(torch.equal(scaled[name], kept) for name, kept in got.items())


def test_an_adjustment_by_hand() -> None:
    """ρ = 0.5. Of a the two smallest in use are open, −1 and 2; of b, with one in use, none is, but the one
    that is not in use. What stays has N = 4 + 4 + 3 + 1 (the bias) = 12 and T = 1 + 2 · 1 + 4 = 7.
    Gains a second: a's −1 has 9, above 12/7: now N/T = 21/8. b's 0 has 12/4 = 3, above it: 33/12.
    a's 2 has 2.7, below 2.75, though it was above 21/8."""
    weights = {"a": torch.tensor([5.0, -1.0, 3.0, 2.0]), "b": torch.tensor([0.0, 2.0])}
    mask = {"a": torch.tensor([True] * 4), "b": torch.tensor([False, True])}
    squares = {"a": [4.0, 9.0, 4.0, 2.7], "b": [12.0, 3.0], "bias": [1.0]}
    gains = {name: torch.tensor(values) for name, values in squares.items()}
    costs = Costs(1.0, {"a": 1.0, "b": 4.0})
    got = adjust(weights, mask, gains, costs, 0.5)
    assert got["a"].tolist() == [True, True, True, False]
    assert got["b"].tolist() == [True, True]
    slower = adjust(weights, mask, gains, Costs(2.0, costs.weight), 0.5)  # 12/8, 21/9, 33/13 < 2.7
    assert bool(slower["a"][3])


def test_the_share_halves_in_ten_thousand_rounds() -> None:
    assert [adjustable_share(t) for t in (0, 10_000, 20_000)] == pytest.approx([0.3, 0.15, 0.075])
    assert adjustable_share(5_000) == pytest.approx(0.3 / 2**0.5)


def test_costs_add_up_to_the_clock() -> None:
    """The whole network's T is a round of the paper's clock. A weight costs its share of training by its
    layer's multiply-adds, and its bytes' time."""
    shape, clock = architecture("lenet", 10, DIGITS_INPUT), PaperClock(1.3)
    n = np.array([300, 200, 100])
    costs = weight_costs(shape, clock, [4, 1, 2], n)
    assert set(costs.weight) == set(SIZES)  # no bias
    send = 3 * 4 / 2**20 * (1 / 6.25 + 1 / 12.5)
    # conv2's 2400 weights are used at 2 × 2 places, each of fc1's 1920 once
    at = {name: costs.weight[name] - send for name in ("conv2.weight", "fc1.weight")}
    assert at["conv2.weight"] == pytest.approx(4 * at["fc1.weight"])
    assert costs.weight["conv2.weight"] > costs.weight["fc1.weight"] > send
    whole = clock.round([4, 1, 2], Work(44_040, 44_040, 4 * FULL, 4 * FULL, n, n)).seconds
    weights = sum(costs.weight[name] * size for name, size in SIZES.items())
    assert costs.fixed + weights == pytest.approx(whole)


def test_weights_come_back_with_the_values_they_left_with() -> None:
    def mask(bits: str) -> Tensors:
        return {"w": torch.tensor([bit == "1" for bit in bits])}

    weights = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]), "b": torch.ones(1)}
    dense = {"w": torch.full((4,), 9.0)}
    first, dense = change_mask(weights, mask("1111"), dense, mask("1010"))
    assert (first["w"].tolist(), dense["w"].tolist()) == ([1, 0, 3, 0], [1, 2, 3, 4])
    trained = {**first, "w": torch.tensor([10.0, 0.0, 30.0, 0.0])}
    second, dense = change_mask(trained, mask("1010"), dense, mask("0110"))
    assert (second["w"].tolist(), dense["w"].tolist()) == ([0, 2, 30, 0], [10, 2, 30, 4])
    assert second["b"] is weights["b"]


def squared(run: api.Run, start: Tensors, device: int, number: int, mask: Tensors) -> Tensors:
    """(Σ g)² of a device's round inside a mask, with the gradients of masked weights too, in float64."""
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in start.items()}

    def step(name: str, grad: torch.Tensor) -> torch.Tensor:
        total[name] += grad
        return grad * mask[name] if name in mask else grad

    rng = stream(777, "batches", number, device)
    walk(run, start, taken(run, run.split.device(device)), rng, number, step)
    return {name: tensor**2 for name, tensor in total.items()}


def test_a_device_reports_the_squares_of_its_rounds(home: object) -> None:
    """It adds up over its rounds, biases too, sends the sum in every third round and begins again."""
    run = api.start(config(adjust_every=3))
    generator = torch.Generator().manual_seed(1)
    mask = {name: torch.rand(run.state.weights[name].shape, generator=generator) < 0.5 for name in SIZES}
    state = replace(run.state, weights=mask_tensors(run.state.weights, mask), mask=mask)
    left = FULL - sum(int((~kept).sum()) for kept in mask.values())
    executor, store = (
        Executor(run.config, SplitHoldings(run.dataset, run.split, 777), compose(run.config)),
        InMemoryStore(),
    )
    cohort = LocalCohort(executor, Evaluator(run.dataset, run.config), store)
    sums = [squared(run, state.weights, 2, number, mask) for number in range(4)]
    for number, since in enumerate((0, 0, 0, 3)):
        message = broadcast_of(replace(state, round=number), run.config)
        with deterministic():
            (upload,) = cohort.train(message, [2])
        memory, reports = store.recall(2, number + 1), number == 2
        assert upload.nbytes(mask) == 4 * left + reports * 4 * FULL == run._algorithm.reply(message)
        told = upload.extra if reports else memory
        assert set(told) == {f"g2/{name}" for name in state.weights}
        for name in state.weights:
            expected = torch.stack([total[name] for total in sums[since : number + 1]]).sum(0)
            torch.testing.assert_close(told[f"g2/{name}"].double(), expected, rtol=2e-3, atol=1e-6)
        if reports:
            assert not any(bool(tensor.any()) for tensor in memory.values())
        else:
            assert upload.extra == {}


def test_the_server_weighs_reports_by_samples(home: object) -> None:
    run = api.start(config(adjust_every=1, first_passes=0, rounds=1))
    chosen = select(run.config, 0)
    told = [squared(run, run.state.weights, device, 0, {}) for device in chosen]
    sizes = [len(run.split.device(device)) for device in chosen]
    assert len(set(sizes)) > 1
    run.run()
    for name, mean in averaged(sizes, told).items():
        torch.testing.assert_close(run.state.steps[f"g2/{name}"].double(), mean, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("base", ["fedavg", "feddum"])
def test_a_run(home: object, base: str) -> None:
    run = api.start(config(base=base))
    rounds = iter(run)
    for number in range(4):
        before = run.state
        next(rounds)
        record, mask = run.records[number], run.state.mask
        assert set(mask) == set(SIZES)
        assert ("pruning" in record) == (number in (0, 2))
        if number % 2:
            assert digest(mask) == digest(before.mask)
        else:
            assert number == 0 or digest(mask) != digest(before.mask)
            assert record["pruning"]["parameters"]["after"] == record["parameters"]
        for name, kept in mask.items():
            assert not bool(run.state.weights[name][~kept].any())
            if base == "feddum":
                assert not bool(run.state.steps[f"1/momentum/{name}"][~kept].any())
        left = FULL - sum(int((~kept).sum()) for kept in mask.values())
        assert (record["parameters"], record["macs"]) == (left, 44_040)
        assert left < FULL
        first = 4 * FULL if number == 0 else 0  # to the first device, and back with the mask, a bit a weight
        assert record["bytes_down"] == 3 * (4 * left + BITMAP) + first
        assert record["bytes_up"] == 3 * 4 * (left + (number % 2) * FULL) + first + (number == 0) * BITMAP
        if number == 1:
            check_adjustment(run)
    assert run.records[0]["pruning"]["device"] == select(run.config, 0)[0]
    assert run.records[2]["pruning"]["share"] == pytest.approx(0.3 * 0.5 ** (2 / 10_000))


def check_adjustment(run: api.Run) -> None:
    """What the server would do next, against the obvious, and what becomes of the weights."""
    engine, old, share = run._engine(), run.state, 0.3 * 0.5 ** (2 / 10_000)
    context = run._context(engine)
    new, _ = adjustment()(old, context, engine)
    squares = {name.removeprefix("g2/"): t for name, t in old.steps.items() if name.startswith("g2/")}
    assert len(squares) == 10
    expected = obvious(old.weights, old.mask, squares, round_costs(old, context), share, float)
    came = went = 0
    for name, kept in new.mask.items():
        assert int((kept != expected[name]).sum()) <= 1  # which a rounding may decide
        back, gone = kept & ~old.mask[name], old.mask[name] & ~kept
        came, went = came + int(back.sum()), went + int(gone.sum())
        assert torch.equal(new.weights[name][back], old.steps[f"dense/{name}"][back])
        assert bool(new.weights[name][back].all())
        assert not bool(new.weights[name][~kept].any())
        both = kept & old.mask[name]
        assert torch.equal(new.weights[name][both], old.weights[name][both])
        assert torch.equal(new.steps[f"dense/{name}"][gone], old.weights[name][gone])
    assert min(came, went) > 100
    assert not any(name.startswith("g2/") for name in new.steps)


def test_an_adjustment_without_reports_is_said(home: object, tmp_path: Path) -> None:
    """Nobody of the first cohort finishes in time, so nobody reports."""
    keys = config(adjust_every=1, first_passes=0, rounds=2)
    run = api.train(keys.replace(clock=slow_cohort(keys, tmp_path / "fleet.csv")))
    assert "no squared gradients" in run.records[1].get("pruning_skipped", "")


# the first mask


def lenet_search(kernels: Kernels = "c") -> Search:
    shape = architecture("lenet", 10)
    model = make_model(shape, initialise(shape, 1), kernels)
    return Search(model, samples(40), Costs(1.0, {"fc3.weight": 1.0}), 10)


def test_no_passes_find_a_full_mask() -> None:
    search = lenet_search()
    begun = digest(search.model.weights())
    mask, dense = search.run(9, stream(1, "a"))  # fewer than it takes to look
    assert digest(dense) == begun
    assert bool(mask["fc3.weight"].all())


@pytest.mark.parametrize(
    ("accuracies", "limit", "looks", "adjusted"),
    [
        ([0.15], 1000, 36, 8),
        ([0.0, 0.1499, 0.15, 0.0], 1000, 38, 8),  # it has begun, whatever comes then
        ([0.1499], 300, 30, 0),
        ([0.15], 119, 11, 3),
    ],
)  # fmt: skip
def test_the_search_ends_after_five_calm_changes(
    monkeypatch: pytest.MonkeyPatch, accuracies: list[float], limit: int, looks: int, adjusted: int
) -> None:
    """Changes of 10 % and 7 % are calm and the next is not; then five that are. Adjusted is at the first look
    (after ten passes) that finds 1.5/C, and every 50 passes from then on: the 8th after 10 + 7 · 50."""
    densities = iter([0.9, 0.84, 0.5, 0.46, 0.44, 0.42, 0.40, 0.39, 0.1])
    seen = {"looks": 0, "adjusted": 0}

    def fit(*_: object) -> int:
        seen["looks"] += 1
        return 0

    def density(weights: Tensors, mask: Tensors, *_: object) -> Tensors:
        seen["adjusted"] += 1
        return {"fc3.weight": (torch.arange(840) < 840 * next(densities)).view(10, 84)}

    def score(*_: object) -> Score:
        return Score(round(1e4 * accuracies[min(seen["looks"], len(accuracies)) - 1]), 0.0, 10_000)

    for name, fake in (("fit", fit), ("adjust", density), ("score", score)):
        monkeypatch.setattr(import_module("feddumap.methods.prunefl"), name, fake)
    mask, _ = lenet_search().run(limit, stream(1, "a"))
    assert seen == {"looks": looks, "adjusted": adjusted}
    left = {8: 0.39, 3: 0.5, 0: 1.0}[adjusted]
    assert mask["fc3.weight"].double().mean() == pytest.approx(left, abs=1 / 840)


@both_kernels
def test_what_the_search_trains(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """Ten passes at 0.1 and 20 a step, ten more inside a mask; each time the Σ g² of these, in float64."""
    half = {"fc3.weight": torch.rand((10, 84), generator=torch.Generator().manual_seed(0)) < 0.5}
    seen: list[Tensors] = []

    def spy(weights: Tensors, mask: Tensors, squares: Tensors, *_: object) -> Tensors:
        seen.append(dict(squares))
        return half

    for name, fake in (("adjust", spy), ("score", lambda *_: Score(1, 0.0, 1)), ("EVERY", 10)):
        monkeypatch.setattr(import_module("feddumap.methods.prunefl"), name, fake)
    search, rng = lenet_search(kernels), stream(1, "b")
    model = network(architecture("lenet", 10), search.model.weights()).double()
    with deterministic():
        mask, dense = search.run(20, stream(1, "b"))
    named = dict(model.named_parameters())
    left = torch.zeros(())
    for got in seen:
        squares = {name: torch.zeros_like(parameter.data) for name, parameter in named.items()}
        for inputs, labels in batches(search.samples, 10, 20, rng, augment=None):
            grads = torch.autograd.grad(F.cross_entropy(model(inputs.double()), labels), list(named.values()))
            for (name, parameter), grad in zip(named.items(), grads, strict=True):
                squares[name] += grad**2
                parameter.data -= 0.1 * grad * (half[name] if left.ndim and name in half else 1)
        assert got.keys() == squares.keys()
        for name, square in squares.items():
            torch.testing.assert_close(got[name], square, rtol=2e-3, atol=1e-8)
        if not left.ndim:
            left = named["fc3.weight"].data.clone()
            named["fc3.weight"].data *= half["fc3.weight"]
    assert (len(seen), mask) == (2, half)
    named["fc3.weight"].data[~half["fc3.weight"]] = left[~half["fc3.weight"]]  # what left keeps its value
    for name, parameter in named.items():
        torch.testing.assert_close(dense[name].double(), parameter.data, rtol=1e-4, atol=1e-5)


def test_a_first_mask_from_the_wire() -> None:
    weights = {"w": torch.randn(3, 7), "b": torch.randn(3)}
    kept = torch.rand(3, 7) < 0.5
    good = {"mask/w": torch.from_numpy(np.packbits(kept))} | {f"weights/{n}": t for n, t in weights.items()}
    mask, dense = unpacked(Answer(4, tensors=good), weights, ["w"])
    assert torch.equal(mask["w"], kept)
    assert digest(dense) == digest(weights)
    for odd in (torch.zeros(2, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), torch.zeros(3), None):
        sent = {k: t for k, t in {**good, "mask/w": odd}.items() if t is not None}
        with pytest.raises(FeddumapError, match="device 4 sent no mask for w: expected 21 bits"):
            unpacked(Answer(4, tensors=sent), weights, ["w"])
    for name, odd in (("b", torch.full((3,), torch.nan)), ("b", torch.zeros(4)), ("c", torch.zeros(3))):
        with pytest.raises(FeddumapError, match="device 4 sent a first model that is not finite or of"):
            unpacked(Answer(4, tensors={**good, f"weights/{name}": odd}), weights, ["w"])
