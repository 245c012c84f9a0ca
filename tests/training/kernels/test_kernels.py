"""The kernels in C compute what torch computes in float64: every way, every variant, chains of any shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feddumap.core.messages import CIFAR_INPUT
from feddumap.models import architecture, initialise
from feddumap.models import network as build
from feddumap.training import augment
from feddumap.training.backends import make_model
from feddumap.training.chain_model import EVALUATION_BATCH, ChainModel
from feddumap.training.kernels import loader
from feddumap.training.kernels.chain import AUTOMATIC, DIRECT, DOTS, WINOGRAD, Chain, Images
from feddumap.training.kernels.spec import ChainSpec, LayerSpec, spec_of
from feddumap.training.samples import Samples, batches, to_input
from tests.support.kernel_chains import (
    EXACT,
    WAYS,
    Case,
    Conv,
    Problem,
    cases,
    compare,
    flattened,
    libraries,
    loss_of,
    smooth,
    whole,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(isinstance(loader.find(), str), reason=f"no kernels here: {loader.find()}"),
]

FEW = settings(deadline=None, suppress_health_check=list(HealthCheck))
TOLERANCE = 1e-5  # of the largest gradient of a tensor

TABLE = [
    Case((Conv(6, (5, 5), pool=True), Conv(16, (5, 5), pool=True)), (24, 10), size=(20, 18)),
    Case((Conv(8, padding=(1, 1)), Conv(8, padding=(1, 1), pool=True)), size=(8, 8)),
    Case((Conv(16, padding=(1, 1)), Conv(24, padding=(1, 1), relu="before", pool=True)), size=(6, 10)),
    Case((Conv(13, (1, 5), (0, 2)), Conv(17, (4, 2), (1, 0), pool=True)), (11, 7, 3), 4, (9, 12), 5, 3),
    Case((Conv(1, (1, 1), relu=""),), (1,), 1, (5, 5), 1, 1),
    Case((Conv(70, (2, 3)),), (2,), 1, (5, 7), 13, 13),
    Case((Conv(9), Conv(10), Conv(11, pool=True), Conv(12, (2, 2))), (5,), 3, (15, 14), 3, 2, relu=False),
    Case((Conv(3, (7, 7), (2, 2), pool=True, relu=""), Conv(5, (3, 1), (1, 1))), (4,), 3, (11, 20), 6, 6),
    Case((Conv(8), Conv(65, relu="", pool=True), Conv(7, (1, 1), relu="before")), (6, 5), 1, (9, 9), 2, 2),
    Case((Conv(40, (5, 5), (2, 2)), Conv(33, (5, 5), (2, 2), pool=True)), (10,), 3, (6, 7), 2, 1),
]
"""LeNet's kinds, Winograd's, odd widths, single numbers, more than a mask's 64 channels, rows in several
parts."""


def found_gradients(problem: Problem, chain: Chain) -> tuple[float, list[torch.Tensor]]:
    grads = torch.full((chain.parameters,), torch.nan)
    loss = chain.gradients(problem.checked(), (0, problem.case.count), problem.flat, grads)
    return loss, problem.split(grads)


# --- gradients, outputs and losses ----------------------------------------------------------------------


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_shapes_of_a_table(case: Case) -> None:
    """With weights and pixels of any value."""
    problem = smooth(case)
    outputs, loss = problem.network(problem.inputs), loss_of(problem)
    expected = problem.gradients(loss)
    for name, chain in problem.chains():
        found = chain.forward(problem.checked(), problem.flat)
        compare([found], [outputs.detach()], 5e-6, name)
        total, grads = found_gradients(problem, chain)
        assert total / case.count == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)
        compare(grads, expected, TOLERANCE, name)


@settings(FEW, max_examples=60)
@given(cases(), st.integers(0, 10**6))
def test_any_chain(case: Case, seed: int) -> None:
    """Outputs are torch's to the bit, gradients but for rounding, and a second time the same to the bit."""
    problem = whole(case, seed)
    outputs, loss = problem.network(problem.inputs).detach(), loss_of(problem)
    assert float(outputs.abs().max()) < EXACT * problem.unit
    expected = problem.gradients(loss)
    for name, chain in problem.chains():
        assert torch.equal(chain.forward(problem.checked(), problem.flat).double(), outputs), name
        total, grads = found_gradients(problem, chain)
        assert total / case.count == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)
        compare(grads, expected, TOLERANCE, name)
        again = found_gradients(problem, chain)
        assert total == again[0]
        assert all(map(torch.equal, grads, again[1])), name


@settings(FEW, max_examples=40)
@given(cases(widest=20), st.integers(0, 10**6))
def test_ties_are_broken_as_torch_breaks_them(case: Case, seed: int) -> None:
    """Constant patches and whole numbers: gradients of whole numbers are exact and equal torch's."""
    problem = whole(case, seed, blocks=True)
    outputs = problem.network(problem.inputs)
    wanted = torch.from_numpy(np.random.default_rng(seed).integers(-1, 2, tuple(outputs.shape)))
    expected = problem.gradients((outputs * wanted).sum())
    for name, chain in problem.chains():
        grads = torch.full((chain.parameters,), torch.nan)
        chain.forward(problem.checked(), problem.flat)
        chain.backward(wanted.float(), problem.flat, grads)
        for mine, theirs in zip(problem.split(grads), expected, strict=True):
            largest = theirs.abs().max()
            exact = bool(largest < EXACT * _unit(theirs))
            if exact:
                assert torch.equal(mine.double(), theirs), name
            else:
                compare([mine], [theirs], 1e-6, name)


def _unit(numbers: torch.Tensor) -> float:
    """The power of two that all of them are multiples of; 0 if they have too many bits for float32."""
    values = numbers[numbers != 0].abs()
    if not len(values):
        return 1.0
    unit = 2.0 ** float(torch.floor(torch.log2(values.max()))) * 2.0**-21
    while bool((values % (2 * unit) == 0).all()) and 2 * unit <= float(values.min()):
        unit *= 2
    return unit if bool((values % unit == 0).all()) else 0.0


def test_equal_windows_give_their_gradient_to_the_first() -> None:
    """A black image: every window ties, and which one it was shows in the layer before."""
    case = Case((Conv(2, (1, 1), relu=""), Conv(8, padding=(1, 1), pool=True, relu="")), (3,), 1, (8, 6))
    problem = whole(case, 1)
    problem.images.zero_()
    problem.images[:, 3, 2] = 255
    expected = problem.gradients(problem.network(problem.inputs).sum())
    for name, chain in problem.chains():
        grads = torch.empty(chain.parameters)
        chain.forward(problem.checked(), problem.flat)
        chain.backward(torch.ones(4, 3), problem.flat, grads)
        assert all(torch.equal(a.double(), b) for a, b in zip(problem.split(grads), expected, strict=True)), (
            name
        )


def test_variants_agree() -> None:
    if len(libraries()) < 2:
        pytest.skip("only one variant is built for this processor")
    problem = smooth(TABLE[0])
    for number in WAYS.values():
        found = [problem.chain(number, calls) for calls in libraries().values()]
        first, *others = (flattened(found_gradients(problem, chain)[1]).double() for chain in found)
        for other in others:
            compare([other], [first], TOLERANCE, str(number))


def test_a_wide_first_layer() -> None:
    """So many weights for so few pixels that the automatic way is not the usual one."""
    problem = smooth(Case((Conv(4000, (5, 5), relu=""),), (2,), 3, (6, 6), 2, 2))
    expected = problem.network(problem.inputs).detach()
    for calls in libraries().values():
        found = problem.chain(AUTOMATIC, calls).forward(problem.checked(), problem.flat)
        compare([found], [expected], 1e-5, calls.variant)


def test_another_loss() -> None:
    """Forward and backward apart, with the divergence from a teacher's outputs."""
    problem = smooth(TABLE[1])
    teacher = torch.softmax(torch.randn(4, 10, generator=torch.Generator().manual_seed(0)), 1)

    def divergence(outputs: torch.Tensor) -> torch.Tensor:
        return F.kl_div(F.log_softmax(outputs, 1), teacher.to(outputs.dtype), reduction="batchmean")

    expected = problem.gradients(divergence(problem.network(problem.inputs)))
    for name, chain in problem.chains():
        outputs = chain.forward(problem.checked(), problem.flat, (0, 4)).requires_grad_()
        (wanted,) = torch.autograd.grad(divergence(outputs), outputs)
        grads = torch.empty(chain.parameters)
        chain.backward(wanted.contiguous(), problem.flat, grads)
        compare(problem.split(grads), expected, TOLERANCE, name)


@pytest.mark.parametrize("case", TABLE[:4], ids=str)
def test_a_shift_is_added_to_the_outputs(case: Case) -> None:
    """As `label_shift` makes one: classes that do not occur are far down."""
    problem = smooth(case)
    classes = case.linear[-1]
    shift = torch.linspace(-9.2, -0.7, classes)
    loss = F.cross_entropy(problem.network(problem.inputs) + shift.double(), problem.labels)
    expected = problem.gradients(loss)
    images = Images(problem.images, labels=problem.labels, shift=shift)
    for name, chain in problem.chains():
        grads = torch.full((chain.parameters,), torch.nan)
        total = chain.gradients(images, (0, case.count), problem.flat, grads)
        assert total / case.count == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)
        compare(problem.split(grads), expected, TOLERANCE, name)


def test_the_scale_of_a_sum() -> None:
    problem = whole(TABLE[1])
    chain, (three, mean) = problem.chain(), (torch.empty(problem.chain().parameters) for _ in range(2))
    total = chain.gradients(problem.checked(), (0, 4), problem.flat, three, scale=3.0)
    assert chain.gradients(problem.checked(), (0, 4), problem.flat, mean) == total
    torch.testing.assert_close(three, 12 * mean, rtol=1e-5, atol=1e-6)


# --- batches --------------------------------------------------------------------------------------------


@settings(FEW, max_examples=20)
@given(cases(widest=30), st.integers(0, 10**6))
def test_outputs_do_not_depend_on_the_batch(case: Case, seed: int) -> None:
    """Not on an image's place, on the others, nor on how many fit: to the bit, with pixels of any value."""
    rng = np.random.default_rng(seed)
    problem = whole(case, seed)
    images = torch.from_numpy(rng.integers(0, 256, (11, *case.size, case.channels), dtype=np.uint8))
    order = rng.integers(0, 11, 17)
    for calls in libraries().values():
        for way in (DIRECT, WINOGRAD, DOTS):
            alone = Chain(problem.spec, 1, case.size, way, calls).forward(Images(images), problem.flat)
            for batch in (3, 17):
                chain = Chain(problem.spec, batch, case.size, way, calls)
                assert torch.equal(chain.forward(Images(images, order), problem.flat), alone[order])
            some = chain.forward(Images(images, order), problem.flat, (5, 9))
            assert torch.equal(some, alone[order][5:9])


def test_a_smaller_batch_after_a_larger_one() -> None:
    """Nothing of a batch is left in the buffers."""
    problem = whole(Case(TABLE[3].convolutions, (11, 3), 4, (9, 12), 13, 13))
    for way in WAYS.values():
        used, fresh = problem.chain(way), problem.chain(way)
        one, other = torch.empty(used.parameters), torch.empty(used.parameters)
        used.gradients(problem.checked(), (0, 13), problem.flat, one)
        used.gradients(problem.checked(), (4, 7), problem.flat, one)
        fresh.gradients(problem.checked(), (4, 7), problem.flat, other)
        assert torch.equal(one, other)


@pytest.mark.parametrize("channels", [1, 3, 4, 5])
def test_crops_and_mirrors(channels: int) -> None:
    """As `augment.crop_and_flip` makes them, also where the chain does not see the last rows."""
    rng = np.random.default_rng(channels)
    images = rng.integers(0, 256, (6, 9, 12, channels), dtype=np.uint8)
    order = rng.integers(0, 6, 40)
    crops = augment.draw(40, rng, 4, flip=True)
    cropped = torch.from_numpy(augment.crop_and_flip(augment.pad(images, 4), order, crops, 4))
    problem = whole(Case((Conv(5, (2, 3), (1, 0)),), (40,), channels, (9, 12)))
    spec = problem.spec.maps_of("0")
    for size in [(9, 12), (7, 9), (9, 5)]:
        chain = Chain(spec, 7, size)
        flat = problem.flat[: chain.parameters]
        found = chain.forward(Images(torch.from_numpy(images), order, crops), flat)
        assert torch.equal(found, chain.forward(Images(cropped[:, : size[0], : size[1]].contiguous()), flat))
    far = np.array([[9, 0, 0], [-9, 0, 1], [0, 12, 0], [0, -12, 1], [2**20, -(2**20), 0]], dtype=np.int32)
    found = chain.forward(Images(torch.from_numpy(images[:5]), crops=far), flat)
    black = torch.zeros(5, *size, channels, dtype=torch.uint8)
    assert torch.equal(found, chain.forward(Images(black), flat))


def test_every_byte_is_a_float_as_in_torch() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1)
    chain = Chain(ChainSpec((LayerSpec("0", 1, 1, (1, 1)),)), 1, (16, 16))
    found = chain.forward(Images(images), torch.tensor([1.0, 0.0]))
    assert torch.equal(found.view(16, 16), to_input(images)[0, 0])


# --- what is not a number -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", range(8))
def test_nothing_becomes_a_number_again(value: float, place: int) -> None:
    """A weight or bias that is no number: wherever torch's outputs and loss are none, the kernels' are
    none."""
    case = Case((Conv(9, padding=(1, 1), pool=True), Conv(8, padding=(1, 1), relu="")), (6, 5), size=(8, 8))
    problem = whole(case, 3)
    parameter = list(problem.network.parameters())[place]
    with torch.no_grad():
        parameter.view(-1)[0] = value
    outputs, loss = problem.network(problem.inputs).detach(), loss_of(problem).item()
    for name, chain in problem.chains():
        found = chain.forward(problem.checked(), problem.flat).double()
        assert not (found.isfinite() & ~outputs.isfinite()).any(), name
        if "winograd" not in name and "automatic" not in name:
            torch.testing.assert_close(found, outputs, equal_nan=True, rtol=0, atol=0)
        total, _ = found_gradients(problem, chain)
        assert np.isfinite(loss) or not np.isfinite(total), name
        assert not np.isnan(loss) or np.isnan(total), name


def test_pools_and_relus_keep_what_is_not_a_number() -> None:
    """∞ · 0 is not a number, ∞ · 1 is ∞: windows with each of both at each place."""
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 2, (4, 12, 12, 3), dtype=np.uint8) * 255)
    weight = torch.ones(9, 1, 1, 3)
    weight[::2, ..., 0], weight[::3, ..., 1] = torch.inf, -torch.inf
    flat = torch.cat([weight.reshape(-1), torch.zeros(9)])
    x = F.conv2d(to_input(images), weight.permute(0, 3, 1, 2))
    for pool, relu in [(True, True), (True, False), (False, True)]:
        expected = F.max_pool2d(x, 2) if pool else x
        expected = (F.relu(expected) if relu else expected).flatten(1)
        assert expected.isnan().any()
        assert expected.isfinite().any()
        for calls in libraries().values():
            spec = ChainSpec((LayerSpec("0", 3, 9, (1, 1), pool=pool, relu=relu),))
            found = Chain(spec, 4, (12, 12), DIRECT, calls).forward(Images(images), flat)
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


def test_gradients_that_are_not_numbers() -> None:
    """A bad output makes the same gradients bad as in torch, also in layers of odd width far below it."""
    case = Case((Conv(9), Conv(13, relu=""), Conv(11, pool=True), Conv(7)), (6,), size=(14, 14))
    problem = whole(case, 2)
    for bad in (torch.nan, torch.inf):
        wanted = torch.ones(4, 6, dtype=torch.float64)
        wanted[1, 2] = bad
        expected = problem.gradients((problem.network(problem.inputs) * wanted).sum())
        for name, chain in problem.chains():
            grads = torch.empty(chain.parameters)
            chain.forward(problem.checked(), problem.flat)
            chain.backward(wanted.float(), problem.flat, grads)
            for mine, theirs in zip(problem.split(grads), expected, strict=True):
                assert torch.equal(mine.isfinite(), theirs.isfinite()), name


# --- models ---------------------------------------------------------------------------------------------


def model_of(problem: Problem) -> ChainModel:
    return ChainModel(problem.spec, lambda height, width: (height, width), problem.weights)


@settings(FEW, max_examples=15)
@given(cases(widest=20), st.integers(0, 10**6))
def test_feature_maps(case: Case, seed: int) -> None:
    problem = whole(case, seed)
    model, x = model_of(problem), problem.inputs
    for place, layer in enumerate(problem.network):
        if isinstance(layer, torch.nn.Linear | torch.nn.Flatten):
            break
        x = layer(x)
        if isinstance(layer, torch.nn.Conv2d):
            relu = next(one for one in model._spec.layers if one.name == str(place)).relu
            found = model.maps(str(place), problem.images)
            assert torch.equal(found.double(), x.relu() if relu else x)


def test_a_model_is_torchs() -> None:
    """LeNet on shuffled, cropped batches with a remainder, and sums over more images than a batch has."""
    lenet = architecture("lenet", 10)
    weights = initialise(lenet, 5)
    model, network = make_model(lenet, weights, "c"), build(lenet, weights).double()
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (23, 32, 32, 3), dtype=np.uint8))
    samples = Samples(images, torch.from_numpy(rng.integers(0, 10, 23)))
    assert isinstance(model, ChainModel)
    torch.testing.assert_close(
        model.outputs(images).double(), network(to_input(images).double()), rtol=0, atol=1e-5
    )
    parameters = list(network.parameters())
    for batch in batches(samples, 1, 9, rng, augment=CIFAR_INPUT):
        inputs, targets = batch
        loss = F.cross_entropy(network(inputs.double()), targets)
        found = list(model.named(model.gradients(batch)).values())
        compare(found, list(torch.autograd.grad(loss, parameters)), 2e-5, "lenet")
    chunks = [
        [one.clone() for one in model.named(group).values()] for group in model.summed_gradients(samples)
    ]
    assert len(chunks) == 2
    total = F.cross_entropy(network(to_input(images).double()), samples.targets, reduction="sum")
    summed = [first + second for first, second in zip(*chunks, strict=True)]
    compare(summed, list(torch.autograd.grad(total, parameters)), 2e-5, "summed")


# --- Hessian products -----------------------------------------------------------------------------------


def hessian_product(problem: Problem, direction: torch.Tensor) -> torch.Tensor:
    """torch's, in float64: twice backward."""
    parameters = list(problem.network.parameters())
    first = torch.autograd.grad(loss_of(problem), parameters, create_graph=True)
    inner = sum((g * v).sum() for g, v in zip(first, problem.split(direction.double()), strict=True))
    assert isinstance(inner, torch.Tensor)
    return flattened(list(torch.autograd.grad(inner, parameters)))


@settings(FEW, max_examples=25)
@given(cases(widest=30), st.integers(0, 10**6))
def test_hessian_products(case: Case, seed: int) -> None:
    problem = whole(case, seed)
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(problem.flat.shape, generator=generator) for _ in range(2))
    expected = hessian_product(problem, v)
    for name, chain in problem.chains():
        times = chain.hessian(problem.checked(), (0, case.count), problem.flat, 1 / case.count)
        for_u, for_v = torch.full_like(u, torch.nan), torch.full_like(v, torch.nan)
        times(u, for_u), times(v, for_v)
        compare(problem.split(for_v), problem.split(expected), 3e-5, name)
        apart = u.double() @ for_v.double() - v.double() @ for_u.double()
        assert abs(float(apart)) <= 1e-4 * float(u.norm() * for_v.norm()), name


@pytest.mark.parametrize(
    "count", [1, EVALUATION_BATCH - 3, EVALUATION_BATCH, EVALUATION_BATCH + 1, 2 * EVALUATION_BATCH + 5]
)
def test_hessian_products_of_more_images_than_a_batch(count: int) -> None:
    problem = whole(Case(TABLE[2].convolutions, (7, 10), 3, (6, 10), count, count))
    v = torch.randn(problem.flat.shape, generator=torch.Generator().manual_seed(count))
    product = model_of(problem).hessian(Samples(problem.images, problem.labels))
    found = product(v)
    compare(problem.split(found), problem.split(hessian_product(problem, v)), 3e-5, str(count))
    assert torch.equal(product(v), found)


def test_every_spec_is_read_as_torch_runs_it() -> None:
    """ReLU before and after the pool is the same chain."""
    before, after = (Case((Conv(4, pool=True, relu=relu),), size=(9, 8)) for relu in ("before", "after"))
    assert [layer.relu for layer in spec_of(before.network()).layers] == [True, False]  # type: ignore[union-attr]
    assert [(x.pool, x.relu) for x in spec_of(after.network()).layers] == [(True, True), (False, False)]  # type: ignore[union-attr]
