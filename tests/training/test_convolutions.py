"""A network that is spared work computes what it computes otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddumap.models import architecture, initialise, network
from feddumap.training.convolutions import convolve, fast_convolutions, im2col, input_extent

CASES = [  # images, inputs, outputs, side, kernel, stride, padding, groups
    (3, 4, 5, 9, 3, 1, 0, 1),
    (3, 4, 5, 9, 3, 1, 1, 1),
    (2, 6, 4, 8, 3, 2, 1, 1),
    (2, 6, 4, 8, 1, 2, 0, 1),
    (2, 6, 4, 8, 1, 1, 0, 1),
    (2, 6, 9, 7, 5, 1, 2, 3),
    (4, 5, 7, 4, 3, 1, 1, 1),  # a tiny map: the product forwards too
    (1, 5, 7, 2, 3, 1, 1, 1),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("biased", [True, False])
def test_convolve_is_conv2d(case: tuple[int, ...], biased: bool) -> None:
    """Outputs and all three gradients, in float64, against torch's own convolution."""
    images, inputs, outputs, side, kernel, stride, padding, groups = case
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, bias = draw(images, inputs, side, side), draw(outputs) if biased else None
    weight = draw(outputs, inputs // groups, kernel, kernel)
    leaves = [x, weight, *([bias] if bias is not None else [])]
    expected = F.conv2d(x, weight, bias, stride, padding, groups=groups)
    got = convolve(x, weight, bias, (stride, stride), (padding, padding), groups)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_gradients_of_weights_lie_channels_last() -> None:
    """As the weights do: an update need not transpose them."""
    weight = torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    (grad,) = torch.autograd.grad(convolve(torch.randn(2, 3, 6, 6), weight, None).sum(), [weight])
    assert grad.is_contiguous(memory_format=torch.channels_last)


def test_unrolled_is_unfold() -> None:
    x, weight = torch.randn(2, 3, 7, 6), torch.zeros(1, 3, 3, 2)
    rows = im2col(x, weight, (2, 1), (1, 0), groups=1)[0]
    columns = F.unfold(x, (3, 2), padding=(1, 0), stride=(2, 1))  # [images, inputs · kh · kw, places]
    expected = columns.transpose(1, 2).reshape(-1, 3, 6).transpose(1, 2).reshape(len(rows), -1)
    torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("family", ["cnn", "lenet", "vgg11", "resnet18"])
def test_a_quick_network_has_the_same_gradients_and_is_itself_again(family: str) -> None:
    shape = architecture(family, classes=10)
    net = network(shape, initialise(shape, seed=1)).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 3, 32, 32, generator=generator, dtype=torch.float64)
    labels = torch.tensor([1, 5, 9])

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(F.cross_entropy(net(x), labels), list(net.parameters())))

    expected = gradients()
    with fast_convolutions(net):
        got = gradients()
        spared = net(x)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(spared, net(x))
    assert not any("forward" in vars(module) for module in net.modules())
    assert not net._forward_pre_hooks


def test_the_network_is_itself_again_after_an_error() -> None:
    shape = architecture("cnn", classes=10)
    net = network(shape, initialise(shape, seed=1))
    with pytest.raises(RuntimeError), fast_convolutions(net):
        net(torch.zeros(1, 5, 32, 32))
    assert not any("forward" in vars(module) for module in net.modules())


def test_rows_nobody_sees_change_nothing() -> None:
    """The CNN looks at 30 of 32 rows: its pools drop what is left over; LeNet5 at all of them."""
    for family, rows in (("cnn", 30), ("lenet", 32), ("vgg11", 32)):
        shape = architecture(family, classes=10)
        net = network(shape, initialise(shape, seed=1))
        assert (input_extent(net, 32, 0), input_extent(net, 32, 1)) == (rows, rows)
        x = torch.rand(1, 3, 32, 32, requires_grad=True)
        (grad,) = torch.autograd.grad(net(x).square().sum(), [x])
        used = grad.abs().sum((0, 1)) > 0
        assert not used[rows:].any()
        assert not used[:, rows:].any()
        assert used[rows - 1].any()
        assert used[:, rows - 1].any()


def test_a_chain_with_something_else_in_it_is_seen_whole() -> None:
    strange = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten())
    padded = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten())
    rounded_up = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten())
    odd = nn.Sequential(nn.Conv2d(3, 4, (3, 2)), nn.MaxPool2d(2), nn.Flatten())
    assert [input_extent(chain, 33) for chain in (strange, padded, rounded_up)] == [33, 33, 33]
    assert (input_extent(odd, 33, 0), input_extent(odd, 33, 1)) == (32, 33)
