"""Curvature and the rates read off it: Lanczos, the density rule and the gap rule, against slow oracles."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from feddumap.core.messages import Question
from feddumap.errors import FeddumapError
from feddumap.models import architecture, initialise, network
from feddumap.models.initialization import channels_last
from feddumap.pruning import rates
from feddumap.pruning.curvature import gap, lanczos
from feddumap.pruning.curvature.density import mass_above, stable_rate
from feddumap.pruning.curvature.gap import Gap, first_gap, fisher_spectrum, lipschitz_constant
from feddumap.pruning.curvature.lanczos import Spectrum, flat, hessian
from feddumap.pruning.rates import node_rate
from feddumap.training.backends import make_model
from feddumap.training.model import Model
from feddumap.training.samples import Samples, to_input

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(*, norm: bool = False, smooth: bool = True, seed: int = 0) -> nn.Sequential:
    """A convolutional network of 83 parameters (87 with batch norm), double, channels-last."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 2, 3),
            nn.BatchNorm2d(2) if norm else nn.Identity(),
            nn.Tanh() if smooth else nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8, 3),
        ).double()
        if norm:
            model(torch.randn(9, 3, 4, 4, dtype=torch.float64))  # statistics that are not 0 and 1
    return channels_last(model, keep=True)  # type: ignore[return-value]


def samples(count: int = 12, seed: int = 0) -> Samples:
    """Inputs of 3×4×4 in double precision, so that everything that follows is."""
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.uniform(-1, 1, (count, 4, 4, 3))).permute(0, 3, 1, 2)
    return Samples(images, torch.from_numpy(rng.integers(0, 3, count)))


def vector_loss(model: nn.Module, data: Samples, vector: torch.Tensor) -> torch.Tensor:
    """The loss as a function of one vector, with torch's own means."""
    names, shapes = zip(*((name, value.shape) for name, value in model.named_parameters()), strict=True)
    parts = torch.split(vector, [shape.numel() for shape in shapes])
    values = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    outputs = torch.func.functional_call(model.eval(), values, to_input(data.inputs))
    return F.cross_entropy(outputs, data.targets)


def parameters_of(model: nn.Module) -> torch.Tensor:
    return flat([parameter.detach() for parameter in model.parameters()])


def dense_hessian(model: nn.Module, data: Samples) -> torch.Tensor:
    found = torch.autograd.functional.hessian(lambda v: vector_loss(model, data, v), parameters_of(model))
    assert isinstance(found, torch.Tensor)
    return found


def gradient(model: nn.Module, data: Samples, vector: torch.Tensor) -> torch.Tensor:
    leaf = vector.clone().requires_grad_()
    return torch.autograd.grad(vector_loss(model, data, leaf), leaf)[0]


def rademacher(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).choice([-1.0, 1.0], size))


# --- Hessian-vector products ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"smooth": False}, {"norm": True}], ids=["tanh", "relu", "batch-norm"])
def test_products_equal_the_dense_hessian(kind: dict[str, bool]) -> None:
    model, data = tiny(**kind), samples()
    assert not model[0].weight.is_contiguous()  # channels-last: the memory order is not the logical one
    dense = dense_hessian(model, data)
    product = hessian(model, data)
    for seed in range(3):
        vector = torch.randn(len(dense), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(product(vector), dense @ vector, rtol=1e-10, atol=1e-12)


def test_products_equal_finite_differences() -> None:
    model, data = tiny(), samples()
    start, vector, small = parameters_of(model), rademacher(83), 1e-5
    ahead, behind = (gradient(model, data, start + sign * small * vector) for sign in (1, -1))
    torch.testing.assert_close(
        hessian(model, data)(vector), (ahead - behind) / (2 * small), rtol=1e-6, atol=1e-8
    )


def test_batch_norm_stays_as_it_is() -> None:
    model, data = tiny(norm=True), samples()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    hessian(model, data)(rademacher(87))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- Lanczos --------------------------------------------------------------------------------------------


def test_all_steps_give_the_spectrum_that_the_probe_sees() -> None:
    model, data = tiny(), samples()
    dense = dense_hessian(model, data)
    values, vectors = torch.linalg.eigh(dense)
    probe = rademacher(83)
    found = lanczos.lanczos(hessian(model, data), probe, steps=83)
    scale = float(values.abs().max())
    for value in found.values:  # every Ritz value is an eigenvalue
        assert float((values - value).abs().min()) < 1e-6 * scale
    seen = (vectors.T @ probe) ** 2 / 83
    for value, weight in zip(values.tolist(), seen.tolist(), strict=True):  # and none is missed
        if weight > 1e-4 and abs(value) > 1e-3 * scale:
            at = int(np.abs(found.values - value).argmin())
            assert found.values[at] == pytest.approx(value, abs=1e-6 * scale)
            assert found.weights[at] == pytest.approx(weight, abs=1e-6)
    assert float(values.min()) < -1e-3 * scale < 1e-3 * scale < float(values.max())  # of both signs


def test_few_steps_agree_in_the_extremes_and_moments() -> None:
    model, data = tiny(), samples()
    dense, probe, steps = dense_hessian(model, data), rademacher(83), 16
    found = lanczos.lanczos(hessian(model, data), probe, steps)
    assert len(found.values) == len(found.weights) == steps
    assert (np.diff(found.values) > 0).all()
    values = torch.linalg.eigvalsh(dense)
    assert found.values[-1] == pytest.approx(float(values[-1]), rel=1e-5)
    assert found.values[0] == pytest.approx(float(values[0]), rel=1e-2)
    # Gauss quadrature: Σ w θ^j = vᵀ H^j v / ‖v‖² for every j < 2 · steps
    image = probe
    for power in range(8):
        expected = float(probe @ image) / 83
        assert float(found.weights @ found.values**power) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        image = dense @ image


def basis_seen(diagonal: torch.Tensor, probe: torch.Tensor) -> tuple[torch.Tensor, Spectrum]:
    """The basis vectors, as the operator sees them."""
    seen: list[torch.Tensor] = []

    def product(vector: torch.Tensor) -> torch.Tensor:
        seen.append(vector.clone())
        return diagonal * vector

    spectrum = lanczos.lanczos(product, probe, steps=len(diagonal))
    return torch.stack(seen), spectrum


def test_the_basis_stays_orthogonal() -> None:
    """Strakoš's spectrum: crowded at 1, sparse towards 1000, where rounding ruins the plain recurrence."""
    size = 40
    steps = torch.arange(size, dtype=torch.float64)
    diagonal = 1 + steps / (size - 1) * 999 * 0.85 ** (size - 1 - steps)
    probe = torch.ones(size, dtype=torch.float64)
    basis, spectrum = basis_seen(diagonal, probe)
    unit = torch.eye(len(basis), dtype=torch.float64)
    assert float((basis @ basis.T - unit).abs().max()) < 1e-12
    assert float(np.diff(spectrum.values).min()) > 1e-3  # no ghosts: each eigenvalue once
    assert spectrum.values[-5:] == pytest.approx(diagonal[-5:].numpy(), rel=1e-8)
    plain, before, beta = [probe / probe.norm()], torch.zeros(size, dtype=torch.float64), 0.0
    for _ in range(size - 1):
        image = diagonal * plain[-1] - beta * before
        image = image - (image @ plain[-1]) * plain[-1]
        before, beta = plain[-1], float(image.norm())
        plain.append(image / beta)
    lost = torch.stack(plain)
    assert float((lost @ lost.T - torch.eye(size, dtype=torch.float64)).abs().max()) > 0.1


def test_it_stops_when_the_krylov_space_is_exhausted() -> None:
    diagonal = torch.tensor([2.0] * 10 + [-1.0] * 20 + [5.0] * 10, dtype=torch.float64)
    basis, spectrum = basis_seen(diagonal, rademacher(40))
    assert len(basis) == 3
    assert spectrum.values == pytest.approx([-1, 2, 5])
    assert spectrum.weights == pytest.approx([0.5, 0.25, 0.25])
    basis, spectrum = basis_seen(torch.zeros(7), torch.ones(7))
    assert (len(basis), spectrum.values.tolist(), spectrum.weights.tolist()) == (1, [0.0], [1.0])


# --- the density rule -----------------------------------------------------------------------------------


def slow_rate(values: list[float], weights: list[float]) -> float:
    """The rule as it is told: a density on a grid, r(t) as a sum, t in steps until r settles."""
    low, high = min(values), max(values)
    variance = 1e-5 * max(1.0, high - low)
    start, stop = low - 0.01, high + 0.01
    points = [start + i * ((stop - start) / 9999) for i in range(10_000)]
    density = [0.0] * 10_000
    for value, weight in zip(values, weights, strict=True):
        for i, x in enumerate(points):
            density[i] += weight * math.exp(-((x - value) ** 2) / (2 * variance))
    whole = math.fsum(density)

    def above(t: float) -> float:
        return math.fsum(d for x, d in zip(points, density, strict=True) if x > t) / whole

    inc = 0.1
    while True:
        r = [above(0)]
        while r[-1] >= r[0] / 2:
            r.append(above(len(r) * inc))
            changes = [abs(a - b) for a, b in pairwise(r)]
            if r[-1] >= r[0] / 2 and len(changes) >= 3 and max(changes[-3:]) < 0.005:
                return r[-1]
        inc /= 2


def random_spectrum(seed: int, size: int, scale: float) -> Spectrum:
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(size))
    return Spectrum(np.sort(rng.uniform(-0.3, 1, size)) * scale, weights)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.sampled_from([0.02, 0.3, 2.0, 30.0]))
def test_the_density_rule_equals_the_slow_one(seed: int, size: int, scale: float) -> None:
    spectrum = random_spectrum(seed, size, scale)
    expected = slow_rate(spectrum.values.tolist(), spectrum.weights.tolist())
    assert stable_rate(mass_above(spectrum)) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 50), st.floats(0.001, 1000))
def test_mass_above_falls_from_one_to_zero(seed: int, size: int, scale: float) -> None:
    spectrum = random_spectrum(seed, size, scale)
    above = mass_above(spectrum)
    ends = spectrum.values[0] - 0.02, spectrum.values[-1] + 0.02
    masses = [above(t) for t in np.linspace(*ends, 200)]
    assert masses[0] == pytest.approx(1)
    assert masses[-1] == 0
    assert all(0 <= after <= before <= 1 + 1e-12 for before, after in pairwise(masses))


def test_steps_that_are_too_long_are_halved() -> None:
    asked: list[float] = []

    def above(t: float) -> float:
        asked.append(round(t, 9))
        return 0.8 if t < 0.03 else 0.2

    # 0.1 → 0.2 < 0.4 and 0.05 likewise; 0.025 and 0.0125 are calm once and twice; 0.00625 three times
    assert stable_rate(above) == 0.8
    assert asked == [0, 0.1, 0.05, 0.025, 0.05, 0.0125, 0.025, 0.0375, 0.00625, 0.0125, 0.01875]
    assert stable_rate(lambda t: float(t <= 0)) == 0.0  # never calm, but it ends


# --- the gap rule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "lipschitz", "expected"),
    [
        ([1.0, 2.0, 9.0, 20.0], 1.0, Gap(2, 4)),  # the first, not the largest
        ([20.0, 1.0, 9.0, 2.0], 1.0, Gap(2, 4)),  # in whatever order
        ([1.0, 5.0], 1.0, Gap(0, 2)),  # 4L itself does not exceed 4L
        ([1.0, 1.5, 2.0], 0.0, Gap(1, 3)),
        ([3.0], 0.0, Gap(0, 1)),
        ([-1.0, 0.0, 0.9e-6, 1.1e-6, 1.0], 0.1, Gap(1, 2)),  # the numerical rank is that above 1e-6 λ_max
        ([-2.0, -1.0], 0.0, Gap(0, 0)),
        ([0.0, 0.0], 0.0, Gap(0, 0)),
        ([], 0.0, Gap(0, 0)),
    ],
)
def test_the_first_gap(values: list[float], lipschitz: float, expected: Gap) -> None:
    found = first_gap(np.array(values), lipschitz)
    assert found == expected
    assert found.rate == (expected.m / expected.d if expected.d else 0)


def test_fisher_equals_the_explicit_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny(norm=True), samples(9)
    vector = parameters_of(model)
    each = [data[i : i + 1] for i in range(9)]
    fisher = sum(torch.outer(g, g) for g in (gradient(model, one, vector) for one in each)) / 9
    assert isinstance(fisher, torch.Tensor)
    expected = torch.linalg.eigvalsh(fisher)
    assert float(expected[:-9].abs().max()) < 1e-12  # the rest of the 87 are zero
    found = fisher_spectrum(model, data)
    np.testing.assert_allclose(found, expected[-9:].numpy(), rtol=1e-9, atol=1e-13)
    assert len(gap._blocks(list(model.parameters()), 9)) == 1
    monkeypatch.setattr(gap, "BLOCK_BYTES", 4 * 9 * 54 + 40)
    blocks = gap._blocks(list(model.parameters()), 9)
    assert [[p.numel() for p in block] for block in blocks] == [[54], [2, 2, 2, 24, 3]]
    np.testing.assert_allclose(fisher_spectrum(model, data), found, rtol=1e-12, atol=1e-15)


def test_lipschitz_constant_equals_brute_force() -> None:
    """B(Δ) = HΔ − ∇L(W' + Δ) itself, at nine points on the way."""
    model, other, data = tiny(norm=True), tiny(norm=True, seed=1), samples()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start, target = parameters_of(model), parameters_of(other)
    dense = dense_hessian(model, data)
    points = [(target - start) * i / 8 for i in range(9)]
    images = [dense @ point - gradient(model, data, start + point) for point in points]
    secants = [
        float((b - a).norm() / (q - p).norm())
        for (a, b), (p, q) in zip(pairwise(images), pairwise(points), strict=True)
    ]
    found = lipschitz_constant(model, data, [parameter.detach() for parameter in other.parameters()])
    assert found == pytest.approx(max(secants), rel=1e-8)
    assert found > 1e-3
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert lipschitz_constant(model, data, [p.detach().clone() for p in model.parameters()]) == 0


def test_a_quadratic_loss_has_lipschitz_constant_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def squared(model: nn.Module, data: Samples) -> torch.Tensor:
        return ((model(to_input(data.inputs)) - F.one_hot(data.targets, 3)) ** 2).mean()

    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).double()
    target = [torch.ones_like(parameter) for parameter in model.parameters()]
    assert lipschitz_constant(model, samples(), target) > 1e-3
    for module in (gap, lanczos):
        monkeypatch.setattr(module, "loss_of", squared)
    assert lipschitz_constant(model, samples(), target) < 1e-12


# --- a node's rate --------------------------------------------------------------------------------------


@pytest.fixture(params=["c", "torch"])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Samples]:
    """LeNet and images, with fewer Lanczos steps."""
    monkeypatch.setattr(rates, "STEPS", 4)
    monkeypatch.setattr(rates, "SAMPLES", 8)
    lenet = architecture("lenet", 10)
    rng = np.random.default_rng(3)
    images = torch.from_numpy(rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8))
    data = Samples(images, torch.from_numpy(rng.integers(0, 10, 20)))
    return make_model(lenet, initialise(lenet, 5), request.param), data


def question(mode: str, max_rate: float | None = None) -> Question:
    return Question("rate", {"mode": mode, "max_rate": max_rate})


def test_the_density_of_a_node(node: tuple[Model, Samples]) -> None:
    model, data = node
    lenet, asked, name = architecture("lenet", 10), question("density"), ("device", 30, 2)
    rate = node_rate(model, lenet, data, asked, 777, name)
    assert rate == node_rate(model, lenet, data, asked, 777, name)
    few = data[:8]  # all are used, so only the probe differs
    found = [
        node_rate(model, lenet, few, asked, *other)
        for other in [(777, name), (778, name), (777, ("device", 30, 3)), (777, ("device", 31, 2))]
    ]
    assert len({(one.lambda_min, one.lambda_max) for one in found}) == 4
    assert 0 < rate.p <= 1
    assert rate.m == round(rate.p * 62_006)
    assert (rate.d, rate.lipschitz, rate.clamped) == (62_006, None, False)
    assert rate.lambda_min < rate.lambda_max
    clamped = node_rate(model, lenet, data, question("density", rate.p / 2), 777, name)
    assert clamped == replace(rate, p=rate.p / 2, clamped=True)


def test_a_batch_is_drawn_without_replacement(node: tuple[Model, Samples]) -> None:
    data, name = Samples(node[1].inputs, torch.arange(20)), ("server", 30)
    chosen = rates._subset(data, 1, name).targets.tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 8
    assert chosen != rates._subset(data, 2, name).targets.tolist()
    few = data[:8]
    assert rates._subset(few, 1, name) is few


def test_the_gap_of_a_node(node: tuple[Model, Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = node
    lenet, name = architecture("lenet", 10), ("server", 30)
    for parameter in model.parameters:  # away from the first weights of seed 5
        parameter.data.mul_(1.5)
    rate = node_rate(model, lenet, data, question("gap"), 5, name)
    batch = rates._subset(data, 5, name)
    net = network(lenet, model.weights())
    lipschitz = lipschitz_constant(net, batch, list(initialise(lenet, 5).values()))
    values = fisher_spectrum(net, batch)
    assert (rate.m, rate.d) == first_gap(values, lipschitz)
    assert (rate.lipschitz, rate.lambda_min, rate.lambda_max) == (lipschitz, values[0], values[-1])
    assert lipschitz > 0

    monkeypatch.setattr(rates, "fisher_spectrum", lambda *_: np.array([1.0, 1.1, 1.2, 9.0]))
    for constant, limit, expected in [
        (1.0, None, (0.6, 3, 4, True)),  # 3/4 is above the default limit
        (1.0, 0.9, (0.75, 3, 4, False)),
        (100.0, None, (0.0, 0, 4, False)),  # no gap exceeds 400
    ]:
        monkeypatch.setattr(rates, "lipschitz_constant", lambda *_, value=constant: value)
        found = node_rate(model, lenet, data, question("gap", limit), 5, name)
        assert (found.p, found.m, found.d, found.clamped) == expected


@pytest.mark.parametrize("mode", ["density", "gap"])
def test_a_loss_that_overflows_is_an_error(node: tuple[Model, Samples], mode: str) -> None:
    model, data = node
    for parameter in model.parameters:
        parameter.data.mul_(1e9)  # finite, but products of layers are not
    with pytest.raises(FeddumapError, match=r"overflowed: lower train.lr"):
        node_rate(model, architecture("lenet", 10), data, question(mode), 5, ("server", 30))
