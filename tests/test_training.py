"""The training loop against slow, obvious references."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from feddumap.models import architecture, initialise, network
from feddumap.runtime import exact_math
from feddumap.seeds import stream, torch_stream
from feddumap.training.augment import PAD, crop_and_flip, pad
from feddumap.training.evaluation import Score, chunks, score
from feddumap.training.loop import fit
from feddumap.training.optimizers import sgd
from feddumap.training.samples import Samples, batches, to_input


def samples(count: int, seed: int = 0, size: int = 32) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)
    return Samples(images, torch.randint(0, 10, (count,), generator=generator))


def test_crop_and_flip_equals_one_image_at_a_time() -> None:
    data = samples(20)
    order = np.random.default_rng(1).permutation(20)
    got = crop_and_flip(pad(data.images.numpy()), order, np.random.default_rng(5))
    rng = np.random.default_rng(5)
    tops, lefts = rng.integers(0, 2 * PAD + 1, size=(2, 20))
    mirrored = rng.random(20) < 0.5
    for i, (top, left, mirror) in enumerate(zip(tops, lefts, mirrored, strict=True)):
        padded = np.pad(data.images[order[i]].numpy(), ((4, 4), (4, 4), (0, 0)))
        expected = padded[top : top + 32, left : left + 32]
        np.testing.assert_array_equal(got[i], expected[:, ::-1] if mirror else expected)
    assert {True, False} == set(mirrored.tolist())
    assert got.dtype == np.uint8


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 40), size=st.integers(1, 50), epochs=st.integers(1, 3))
def test_every_epoch_shows_every_sample_once(count: int, size: int, epochs: int) -> None:
    data = Samples(torch.zeros(count, 2, 2, 3, dtype=torch.uint8), torch.arange(count))
    shown = list(batches(data, epochs, size, np.random.default_rng(0), augment=False))
    per_epoch = -(-count // size)
    assert len(shown) == epochs * per_epoch  # E·⌈n/B⌉: no batch is dropped
    for epoch in range(epochs):
        labels = torch.cat([label for _, label in shown[epoch * per_epoch : (epoch + 1) * per_epoch]])
        assert sorted(labels.tolist()) == list(range(count))


def test_paper_step_count() -> None:
    data = samples(25)
    assert sum(1 for _ in batches(data, 2, 10, np.random.default_rng(0), augment=True)) == 6


def test_inputs_are_unit_floats_in_channels_last() -> None:
    data = samples(3)
    inputs = to_input(data.images)
    assert inputs.shape == (3, 3, 32, 32)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(inputs, data.images.permute(0, 3, 1, 2).float() / 255, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["lenet", "cnn"])
def test_fit_equals_torch_sgd_in_float64(family: str) -> None:
    """The loop as everybody would write it, in double precision and plain layout."""
    shape = architecture(family, 10)
    weights = initialise(shape, 3)
    trained = network(shape, weights)
    with exact_math():
        steps = fit(trained, batches(samples(30), 2, 8, stream(1, "b"), augment=True), sgd(), 0.05)
    assert steps == 8

    oracle = network(shape, weights).double().to(memory_format=torch.contiguous_format)
    optimiser = torch.optim.SGD(oracle.parameters(), lr=0.05)
    for inputs, labels in batches(samples(30), 2, 8, stream(1, "b"), augment=True):
        optimiser.zero_grad()
        F.cross_entropy(oracle(inputs.double().contiguous()), labels).backward()
        optimiser.step()
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor.double(), oracle.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_chunks_cover_and_scores_add_up() -> None:
    shape = architecture("lenet", 10)
    model = network(shape, initialise(shape, 3))
    data = samples(600)
    parts = [score(model, Samples(data.images[a:b], data.labels[a:b])) for a, b in chunks(600)]
    total = Score.total(parts)
    outputs = model.eval()(to_input(data.images)).double()
    assert total.count == 600
    assert total.accuracy == pytest.approx(
        (outputs.argmax(1) == data.labels).double().mean().item(), abs=2 / 600
    )
    assert total.mean_loss == pytest.approx(F.cross_entropy(outputs, data.labels).item(), rel=1e-5)


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


def test_exact_math_restores_the_process() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with exact_math():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_exact_math_within_itself() -> None:
    """A device in the server's process leaves the server's settings as they were."""

    def flushes() -> bool:
        return not bool(torch.full((4,), 1e-40).mul(1.0).ne(0).any())

    with exact_math():
        with exact_math():
            assert flushes()
        assert flushes()
        assert torch.get_num_threads() == 1
    assert not flushes()
