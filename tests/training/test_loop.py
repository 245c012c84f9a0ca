"""The training loop against slow, obvious references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.messages import CIFAR_INPUT, Tensors
from feddumap.core.rng import stream, torch_stream
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError
from feddumap.models import architecture, initialise, network
from feddumap.runs.inspect import describe
from feddumap.runs.reader import read_config
from feddumap.system.determinism import deterministic
from feddumap.training.augment import crop_and_flip, draw, pad
from feddumap.training.backends import Kernels, choose_kernels, make_model
from feddumap.training.chain_model import ChainModel
from feddumap.training.evaluation import Score, chunks, score
from feddumap.training.kernels import loader
from feddumap.training.loop import fit
from feddumap.training.model import Model
from feddumap.training.optimizers import (
    UpdateRule,
    adam,
    corrected,
    frozen_momentum,
    masked,
    momentum,
    momentum_from,
    proximal,
    sgd,
    with_gradient_hook,
)
from feddumap.training.samples import Samples, batches, to_input
from feddumap.training.torch_model import TorchModel
from tests.conftest import both_kernels, small


def samples(count: int, seed: int = 0, size: int = 32) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)
    return Samples(images, torch.randint(0, 10, (count,), generator=generator))


def test_crop_and_flip_equals_one_image_at_a_time() -> None:
    data = samples(20)
    order = np.random.default_rng(1).permutation(20)
    crops = draw(20, np.random.default_rng(5), 4, flip=True)
    got = crop_and_flip(pad(data.inputs.numpy(), 4), order, crops, 4)
    rng = np.random.default_rng(5)
    tops, lefts = rng.integers(0, 2 * 4 + 1, size=(2, 20))
    mirrored = rng.random(20) < 0.5
    for i, (top, left, mirror) in enumerate(zip(tops, lefts, mirrored, strict=True)):
        padded = np.pad(data.inputs[order[i]].numpy(), ((4, 4), (4, 4), (0, 0)))
        expected = padded[top : top + 32, left : left + 32]
        np.testing.assert_array_equal(got[i], expected[:, ::-1] if mirror else expected)
    assert {True, False} == set(mirrored.tolist())
    assert (crops.dtype, crops.shape) == (np.int32, (20, 3))
    assert got.dtype == np.uint8


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 40), size=st.integers(1, 50), epochs=st.integers(1, 3))
def test_every_epoch_shows_every_sample_once(count: int, size: int, epochs: int) -> None:
    data = Samples(torch.zeros(count, 2, 2, 3, dtype=torch.uint8), torch.arange(count))
    shown = list(batches(data, epochs, size, np.random.default_rng(0), augment=None))
    per_epoch = -(-count // size)
    assert len(shown) == epochs * per_epoch  # E·⌈n/B⌉: no batch is dropped
    for epoch in range(epochs):
        labels = torch.cat([label for _, label in shown[epoch * per_epoch : (epoch + 1) * per_epoch]])
        assert sorted(labels.tolist()) == list(range(count))


def test_paper_step_count() -> None:
    data = samples(25)
    assert sum(1 for _ in batches(data, 2, 10, np.random.default_rng(0), augment=CIFAR_INPUT)) == 6


def test_inputs_are_unit_floats_in_channels_last() -> None:
    data = samples(3)
    inputs = to_input(data.inputs)
    assert inputs.shape == (3, 3, 32, 32)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(inputs, data.inputs.permute(0, 3, 1, 2).float() / 255, rtol=0, atol=0)


@both_kernels
@pytest.mark.parametrize("family", ["lenet", "cnn"])
def test_fit_equals_torch_sgd_in_float64(family: str, kernels: Kernels) -> None:
    """The loop as everybody would write it, in double precision and plain layout."""
    shape = architecture(family, 10)
    weights = initialise(shape, 3)
    trained = make_model(shape, weights, kernels)
    with deterministic():
        steps = fit(trained, batches(samples(30), 2, 8, stream(1, "b"), augment=CIFAR_INPUT), sgd(), 0.05)
    assert steps == 8

    oracle = network(shape, weights).double().to(memory_format=torch.contiguous_format)
    optimiser = torch.optim.SGD(oracle.parameters(), lr=0.05)
    for inputs, labels in batches(samples(30), 2, 8, stream(1, "b"), augment=CIFAR_INPUT):
        optimiser.zero_grad()
        F.cross_entropy(oracle(inputs.double().contiguous()), labels).backward()
        optimiser.step()
    for name, tensor in trained.weights().items():
        torch.testing.assert_close(tensor.double(), oracle.state_dict()[name], rtol=1e-4, atol=1e-6)


def like(weights: Tensors, seed: int) -> Tensors:
    """Small random numbers for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}


def half_of(weights: Tensors) -> Tensors:
    """A mask for some of the parameters."""
    return {name: like(weights, 4)[name] > 0 for name in ("conv1.weight", "conv2.weight", "fc1.weight")}


def carrying(weights: Tensors, seen: Tensors) -> UpdateRule:
    seen.update(like(weights, 1))
    return momentum_from(0.9, seen)


def watching(seen: Tensors) -> UpdateRule:
    """Sums what it is shown."""

    def see(grads: dict[str, torch.Tensor]) -> None:
        for name, grad in grads.items():
            seen[name] = seen[name] + grad if name in seen else grad.clone()

    return with_gradient_hook(momentum(0.9), see)


RULES: dict[str, Callable[[Tensors, Tensors], UpdateRule]] = {
    "sgd": lambda weights, seen: sgd(),
    "momentum": lambda weights, seen: momentum(0.9),
    "momentum_from": carrying,
    "frozen_momentum": lambda weights, seen: frozen_momentum(0.9, like(weights, 2)),
    "proximal": lambda weights, seen: proximal(0.5),
    "corrected": lambda weights, seen: corrected(like(weights, 3)),
    "masked": lambda weights, seen: masked(momentum(0.9), half_of(weights)),
    "with_gradient_hook": lambda weights, seen: watching(seen),
    "adam": lambda weights, seen: adam(clip=1.0, weight_decay=0.01),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_does_the_same_with_both_kernels(name: str) -> None:
    """Flat or tensor by tensor: the weights, and what a rule gives away besides."""
    shape = architecture("lenet", 10)
    weights = initialise(shape, 3)
    lr = 1e-3 if name == "adam" else 0.05
    models: list[Model] = []
    told: list[Tensors] = []
    for kernels in ("c", "torch"):
        model, seen = make_model(shape, weights, kernels), {}
        with deterministic():
            data = batches(samples(30), 2, 8, stream(1, "b"), augment=CIFAR_INPUT)
            assert fit(model, data, RULES[name](weights, seen), lr) == 8
        models.append(model)
        told.append(seen)
    assert [type(model) for model in models] == [ChainModel, TorchModel]
    ours, theirs = (model.weights() for model in models)
    assert ours.keys() == theirs.keys() == weights.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-4, atol=1e-6)
        assert not torch.equal(tensor, weights[key])
    tells = name in ("momentum_from", "with_gradient_hook")
    assert told[0].keys() == told[1].keys() == (weights.keys() if tells else set())
    for key, tensor in told[0].items():
        torch.testing.assert_close(tensor, told[1][key], rtol=1e-4, atol=1e-6)
    if name == "masked":
        for key, kept in half_of(weights).items():
            for model in models:
                assert torch.equal(model.weights()[key][~kept], weights[key][~kept])


@both_kernels
def test_chunks_cover_and_scores_add_up(kernels: Kernels) -> None:
    shape = architecture("lenet", 10)
    weights = initialise(shape, 3)
    model = make_model(shape, weights, kernels)
    data = samples(600)
    parts = [score(model, data[a:b]) for a, b in chunks(600)]
    total = Score.total(parts)
    outputs = network(shape, weights).double().eval()(to_input(data.inputs).double())
    assert total.count == 600
    assert total.accuracy == pytest.approx(
        (outputs.argmax(1) == data.targets).double().mean().item(), abs=2 / 600
    )
    assert total.mean_loss == pytest.approx(F.cross_entropy(outputs, data.targets).item(), rel=1e-5)


def test_scoring_changes_no_batch_norm_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(2, 3, 32, 32))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    score(model, samples(10))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_streams_are_named() -> None:
    assert stream(1, "a", 2).integers(2**62) == stream(1, "a", 2).integers(2**62)
    names = [(1, "a", 2), (1, "a", 3), (2, "a", 2), (1, "b", 2), (1, "a"), (1, "a", "2")]
    assert len({int(stream(*name).integers(2**62)) for name in names}) == len(names)
    assert len({torch_stream(*name).initial_seed() for name in names}) == len(names)


def test_deterministic_restores_the_process() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with deterministic():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_deterministic_within_itself() -> None:
    """A device in the server's process leaves the server's settings as they were."""

    def flushes() -> bool:
        return not bool(torch.full((4,), 1e-40).mul(1.0).ne(0).any())

    with deterministic():
        with deterministic():
            assert flushes()
        assert flushes()
        assert torch.get_num_threads() == 1
    assert not flushes()


# what computes the gradients


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find", lambda: "nobody compiled it")


@pytest.mark.parametrize(
    ("wanted", "family", "device", "chosen"),
    [
        (None, "cnn", "cpu", "c"),
        (None, "lenet", "cpu", "c"),
        (None, "vgg11", "cpu", "c"),
        (None, "resnet18", "cpu", "torch"),
        (None, "tests.support.own_model:make", "cpu", "torch"),
        (None, "lenet", "cuda", "torch"),
        ("c", "lenet", "cpu", "c"),
        ("torch", "lenet", "cpu", "torch"),
        ("torch", "resnet18", "cuda", "torch"),
    ],
)
def test_which_kernels_are_chosen(
    wanted: Kernels | None, family: str, device: str, chosen: Kernels, heard: list[str]
) -> None:
    assert choose_kernels(wanted, architecture(family, 10), device, heard.append) == chosen
    assert heard == []


@pytest.mark.parametrize(("family", "device"), [("resnet18", "cpu"), ("lenet", "cuda")])
def test_kernels_that_cannot_are_an_error(family: str, device: str, heard: list[str]) -> None:
    with pytest.raises(FeddumapError, match=rf"train.kernels = 'c' with {family} on {device}: .*torch"):
        choose_kernels("c", architecture(family, 10), device, heard.append)
    assert heard == []


@pytest.mark.usefixtures("no_library")
def test_without_the_library_torch_trains_and_it_is_said(heard: list[str]) -> None:
    lenet = architecture("lenet", 10)
    assert choose_kernels(None, lenet, "cpu", heard.append) == "torch"
    (said,) = heard
    assert said.startswith("training with torch, several times slower")
    assert "(nobody compiled it)" in said
    assert loader.REMEDY in said
    # who has no use for it hears nothing
    assert choose_kernels("torch", lenet, "cpu", heard.append) == "torch"
    assert choose_kernels(None, lenet, "cuda", heard.append) == "torch"
    assert choose_kernels(None, architecture("resnet18", 10), "cpu", heard.append) == "torch"
    assert len(heard) == 1
    with pytest.raises(FeddumapError, match=r"cannot be used here \(nobody compiled it\): .*kernels=torch"):
        choose_kernels("c", lenet, "cpu", heard.append)


def test_a_run_without_the_library(home: Path, tmp_path: Path, heard: list[str]) -> None:
    """It says so once, is a run of torch, and stays one when the library is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "find", lambda: "nobody compiled it")
        left = begun(small(train={"rounds": 2}), tmp_path / "run", heard.append)
        assert len([said for said in heard if "nobody compiled it" in said]) == 1
        heard.clear()
        api.resume(left, say=heard.append).close()
    assert read_config(left).train.kernels == "torch"
    run = api.resume(left, say=heard.append).run()
    run.close()
    assert [said for said in heard if "torch" in said] == []
    expected = api.train(small(train={"rounds": 2, "kernels": "torch"}))
    assert digest(run.state.weights) == digest(expected.state.weights)


@both_kernels
def test_a_run_keeps_its_kernels(home: Path, tmp_path: Path, kernels: Kernels) -> None:
    config = small(train={"rounds": 2, "kernels": kernels})
    expected = api.train(config)
    left = begun(config, tmp_path / "run")
    assert read_config(left).train.kernels == kernels == describe(left)["kernels"]
    with pytest.raises(FeddumapError, match="holds this run already"):
        api.start(small(train={"rounds": 2}), left)
    run = api.resume(left)
    assert run.config.train.kernels == kernels
    run.run().close()
    assert digest(run.state.weights) == digest(expected.state.weights)


def test_kernels_differ_by_rounding_only(home: Path) -> None:
    """Not compared by element: of two values closer than rounding, a max-pool gives either the gradient."""
    runs = [api.train(small(train={"rounds": 2, "kernels": kernels})) for kernels in ("c", "torch")]
    ours, theirs = (run.state.weights for run in runs)
    assert digest(ours) != digest(theirs)
    start = api.start(runs[0].config).state.weights
    for name, tensor in ours.items():
        moved = (tensor - start[name]).norm()
        assert (tensor - theirs[name]).norm() <= 0.005 * moved, name


def begun(config: Config, directory: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """A run that was left after its first round."""
    run = api.start(config, directory, say)
    rounds = iter(run)
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    run.close()
    return directory


def old(directory: Path, stack: int | None) -> Path:
    """A run by torch as a version wrote it that knew no other kernels."""
    left = begun(small(train={"rounds": 2, "kernels": "torch"}), directory)
    file = left / "config.toml"
    text = file.read_text()
    assert text.count('kernels = "torch"\n') == 1
    file.write_text(text.replace('kernels = "torch"\n', "" if stack is None else f"stack = {stack}\n"))
    return left


@pytest.mark.parametrize("stack", [None, 1, 5])
def test_a_run_from_before_there_were_kernels_goes_on_with_torch(
    home: Path, tmp_path: Path, heard: list[str], stack: int | None
) -> None:
    left = old(tmp_path / "run", stack)
    with pytest.raises(FeddumapError, match="holds this run already"):
        api.start(small(train={"rounds": 2}), left)
    assert describe(left)["kernels"] == "torch"
    run = api.resume(left, say=heard.append)
    assert (run.state.round, run.config.train.kernels) == (1, "torch")
    run.run().close()
    expected = api.train(small(train={"rounds": 2, "kernels": "torch"}))
    assert digest(run.state.weights) == digest(expected.state.weights)
    if stack == 5:
        (said,) = heard
        assert "trained 5 devices together (train.stack), which is no longer supported" in said
        assert "differ from an uninterrupted run by rounding" in said
    else:
        assert heard == []


def test_an_old_run_takes_more_rounds(home: Path, tmp_path: Path) -> None:
    """Its configuration is written anew: torch from now on by name, and no stack."""
    left = old(tmp_path / "run", 5)
    run = api.resume(left, rounds=3)
    run.run().close()
    text = (left / "config.toml").read_text()
    assert 'kernels = "torch"' in text
    assert "stack" not in text
    assert (run.state.round, run.config.train.kernels) == (3, "torch")


def test_a_new_run_knows_no_stack() -> None:
    with pytest.raises(FeddumapError, match=r"train\.stack"):
        Config.parse({"train": {"stack": 5}})


def test_a_batch_is_no_larger_than_the_data() -> None:
    """Models allocate for the size of the largest batch."""
    given = samples(12)
    (huge,), (whole,) = (list(batches(given, 1, size, stream(1, "b"), augment=None)) for size in (10**9, 12))
    assert huge.epoch.size == huge.stop - huge.start == 12
    assert list(huge.epoch.order) == list(whole.epoch.order)
