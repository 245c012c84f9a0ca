"""`train.calibration`: cross-entropy on z + τ log π while a node trains on its own labels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from feddumap import run as api
from feddumap.core.messages import CIFAR_INPUT
from feddumap.core.rng import stream
from feddumap.core.tensors import all_finite, digest
from feddumap.errors import FeddumapError
from feddumap.models import architecture, initialise, network
from feddumap.training.backends import Kernels, make_model
from feddumap.training.loop import fit, full_gradient
from feddumap.training.optimizers import momentum, sgd
from feddumap.training.samples import MIN_FREQUENCY, Samples, batches, label_shift, to_input
from tests.conftest import both_kernels, small
from tests.support.methods import config_of, every

pytestmark = pytest.mark.usefixtures("one_thread")

LENET = architecture("lenet", 10)


def two_classes(count: int = 40) -> Samples:
    """Images of two of ten labels, one three times as frequent as the other."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return Samples(images, torch.where(torch.arange(count) % 4 == 0, 7, 2))


def test_the_shift_is_the_log_of_the_frequencies() -> None:
    shift = label_shift(two_classes().targets, 10, 0.5)
    assert shift is not None
    expected = np.full(10, math.log(MIN_FREQUENCY))
    expected[2], expected[7] = math.log(0.75), math.log(0.25)
    np.testing.assert_allclose(shift.numpy(), 0.5 * expected, rtol=1e-6)
    assert label_shift(two_classes().targets, 10, 0.0) is None


@both_kernels
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_training_equals_sgd_on_shifted_outputs_in_float64(kernels: Kernels, tau: float) -> None:
    data, weights, lr = two_classes(), initialise(LENET, 3), 0.05
    shift = label_shift(data.targets, 10, tau)
    trained = make_model(LENET, weights, kernels)
    fit(trained, batches(data, 2, 8, stream(1, "b"), augment=CIFAR_INPUT, shift=shift), sgd(), lr)
    oracle = network(LENET, weights).double()
    optimiser = torch.optim.SGD(oracle.parameters(), lr=lr)
    pi = torch.bincount(data.targets, minlength=10).double() / len(data)
    for inputs, labels in batches(data, 2, 8, stream(1, "b"), augment=CIFAR_INPUT):
        optimiser.zero_grad()
        outputs = oracle(inputs.double().contiguous()) + tau * pi.clamp_min(1e-4).log()
        F.cross_entropy(outputs, labels).backward()
        optimiser.step()
    for name, tensor in trained.weights().items():
        torch.testing.assert_close(tensor.double(), oracle.state_dict()[name], rtol=1e-4, atol=1e-6)


@both_kernels
def test_it_is_a_shift_of_the_output_bias_while_training(kernels: Kernels) -> None:
    data, weights = two_classes(), initialise(LENET, 3)
    shift = label_shift(data.targets, 10, 1.0)
    assert shift is not None
    biased = {**weights, "fc3.bias": weights["fc3.bias"] + shift}
    ours, theirs = make_model(LENET, weights, kernels), make_model(LENET, biased, kernels)
    fit(ours, batches(data, 2, 8, stream(1, "b"), augment=CIFAR_INPUT, shift=shift), momentum(0.9), 0.05)
    fit(theirs, batches(data, 2, 8, stream(1, "b"), augment=CIFAR_INPUT), momentum(0.9), 0.05)
    undone = theirs.weights()
    undone["fc3.bias"] -= shift
    for name, tensor in ours.weights().items():
        torch.testing.assert_close(tensor, undone[name], rtol=1e-4, atol=1e-5)


@both_kernels
def test_the_full_gradient_is_of_the_same_loss(kernels: Kernels) -> None:
    data, weights = two_classes(), initialise(LENET, 3)
    shift = label_shift(data.targets, 10, 1.0)
    assert shift is not None
    found = full_gradient(make_model(LENET, weights, kernels), data, shift)
    oracle = network(LENET, weights).double()
    loss = F.cross_entropy(oracle(to_input(data.inputs).double()) + shift.double(), data.targets)
    grads = torch.autograd.grad(loss, list(oracle.parameters()))
    for (name, _), grad in zip(oracle.named_parameters(), grads, strict=True):
        torch.testing.assert_close(found[name].double(), grad, rtol=1e-4, atol=1e-6)


@both_kernels
def test_classes_that_are_absent_keep_their_outputs(kernels: Kernels) -> None:
    """What it is for: the plain loss pushes absent classes down, the calibrated one hardly at all."""
    data, weights = two_classes(), initialise(LENET, 3)
    absent = [c for c in range(10) if c not in (2, 7)]
    gradients = {
        tau: full_gradient(make_model(LENET, weights, kernels), data, label_shift(data.targets, 10, tau))
        for tau in (0.0, 1.0)
    }
    plain, calibrated = (gradients[tau]["fc3.bias"][absent].abs().max() for tau in (0.0, 1.0))
    assert plain > 0.05
    assert calibrated < 0.01 * plain


def test_equal_frequencies_change_nothing_but_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 32, 32, 3), dtype=torch.uint8, generator=generator)
    data, weights = Samples(images, torch.arange(40) % 10), initialise(LENET, 3)
    plain, calibrated = (make_model(LENET, weights, "c") for _ in range(2))
    fit(plain, batches(data, 1, 8, stream(1, "b"), augment=CIFAR_INPUT), sgd(), 0.05)
    shift = label_shift(data.targets, 10, 1.0)
    fit(calibrated, batches(data, 1, 8, stream(1, "b"), augment=CIFAR_INPUT, shift=shift), sgd(), 0.05)
    for name, tensor in calibrated.weights().items():
        torch.testing.assert_close(tensor, plain.weights()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("short_distillation")
@every
def test_every_method_is_calibrated(home: object, name: str) -> None:
    """Other weights after a round, and the same messages."""
    run, plain = (
        api.train(config_of(name, train={"rounds": 1, "lr": 0.2, "calibration": tau})) for tau in (1.0, 0.0)
    )
    assert all_finite(run.state.weights)
    assert digest(run.state.weights) != digest(plain.state.weights)
    if name not in ("imc", "prunefl"):  # whose masks depend on the weights
        for mine, theirs in zip(run.records, plain.records, strict=True):
            assert (mine["bytes_up"], mine["bytes_down"]) == (theirs["bytes_up"], theirs["bytes_down"])


def test_evaluation_uses_plain_outputs(home: object) -> None:
    """The test score is that of the weights, whatever the calibration."""
    run = api.train(small(train={"rounds": 1, "calibration": 1.0}))
    data = run.dataset
    outputs = network(run.state.architecture, run.state.weights).double()(
        to_input(torch.from_numpy(np.array(data.test_inputs))).double()
    )
    labels = torch.from_numpy(data.test_labels.astype(np.int64))
    assert run.records[-1]["loss"] == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-4)


def test_a_negative_calibration_is_refused() -> None:
    with pytest.raises(FeddumapError, match=r"train.calibration = -1.0: .*greater than or equal to 0"):
        small(train={"calibration": -1.0})
