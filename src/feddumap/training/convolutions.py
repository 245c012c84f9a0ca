"""Faster convolutions for networks that torch trains on a CPU; results equal up to rounding.

Without AVX-512, oneDNN's gradient of a convolution's weights takes 1.5 to 7 times as long as the equivalent
matrix product, which is used instead (`USE_MATMUL`). If the pools of a chain drop an odd last row, the last
rows of an image are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Pair = tuple[int, int]
USE_MATMUL = torch.backends.cpu.get_cpu_capability() != "AVX512"  # faster than oneDNN
MIN_FAN_IN = 256  # inputs of an output; below, as in a first layer, oneDNN is faster
MAX_MATMUL_PIXELS = 16  # of a feature map; up to here matmul is faster in the forward pass, too


@contextmanager
def fast_convolutions(network: nn.Module) -> Iterator[None]:
    """A context in which `network` uses the faster convolutions."""
    layers = [layer for layer in network.modules() if type(layer) is nn.Conv2d and _is_supported(layer)]
    with ExitStack() as undo:
        if type(network) is nn.Sequential:
            undo.callback(network.register_forward_pre_hook(_crop).remove)
        for layer in layers:
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
            undo.callback(delattr, layer, "forward")
        yield


def _is_supported(layer: nn.Conv2d) -> bool:
    weight = layer.weight
    return (
        USE_MATMUL
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and isinstance(layer.padding, tuple)
        and weight[0].numel() >= MIN_FAN_IN
        and weight.device.type == "cpu"
        and weight.requires_grad
    )


def _forward(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return nn.Conv2d.forward(layer, x)
    stride, padding = (layer.stride[0], layer.stride[1]), (int(layer.padding[0]), int(layer.padding[1]))
    return convolve(x, layer.weight, layer.bias, stride, padding)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    groups: int = 1,
) -> torch.Tensor:
    """conv2d whose weight gradient is a matrix product: ∂w = gᵀ · im2col(x), for each group."""
    outputs: torch.Tensor = _Convolution.apply(x, weight, bias, stride, padding, groups)  # type: ignore
    return outputs


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Pair,
        padding: Pair,
        groups: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = stride, padding, groups
        ctx.rows = None
        height, width = _outputs(x, weight, stride, padding)
        if groups > 1 or height * width > MAX_MATMUL_PIXELS:
            return F.conv2d(x, weight, bias, stride, padding, groups=groups)
        ctx.rows = im2col(x, weight, stride, padding, groups)[0]
        flat = weight.permute(0, 2, 3, 1).reshape(len(weight), -1).t()
        product = ctx.rows @ flat if bias is None else torch.addmm(bias, ctx.rows, flat)
        return product.view(len(x), height, width, len(weight)).permute(0, 3, 1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, groups = ctx.settings
        grad = grad.contiguous(memory_format=torch.channels_last)
        flat = grad.permute(0, 2, 3, 1).reshape(-1, groups, len(weight) // groups)  # a view
        rows = im2col(x, weight, stride, padding, groups) if ctx.rows is None else ctx.rows[None]
        product = torch.bmm(flat.permute(1, 2, 0), rows)
        height, width = weight.shape[2:]
        for_weight = product.view(len(weight), height, width, -1).permute(0, 3, 1, 2)
        for_bias = grad.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        for_x = None
        if ctx.needs_input_grad[0]:
            settings = None, stride, padding, (1, 1), False, (0, 0), groups
            for_x = torch.ops.aten.convolution_backward(grad, x, weight, *settings, (True, False, False))[0]
        return for_x, for_weight, for_bias, None, None, None


def im2col(x: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair, groups: int) -> torch.Tensor:
    """The inputs of each output of a convolution: [groups, images · height · width, kh · kw · inputs].

    >>> x = torch.arange(9.0).view(1, 1, 3, 3)
    >>> im2col(x, torch.zeros(1, 1, 2, 2), (1, 1), (0, 0), groups=1)[0, :2]
    tensor([[0., 1., 3., 4.],
            [1., 2., 4., 5.]])
    """
    _, inputs, kh, kw = weight.shape
    size = _outputs(x, weight, stride, padding)
    image = x.permute(0, 2, 3, 1)
    if padding != (0, 0):
        image = F.pad(image, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    image = image.contiguous()
    across, down, right, _ = image.stride()
    windows = image.as_strided(
        (groups, len(x), *size, kh, kw, inputs),
        (inputs, across, stride[0] * down, stride[1] * right, down, right, 1),
    )
    return windows.reshape(groups, -1, kh * kw * inputs)


def _outputs(x: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair) -> Pair:
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    height, width = ((side + 2 * pad - kernel) // step + 1 for side, kernel, step, pad in sides)
    return height, width


def _crop(chain: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    (x,) = inputs
    if x.dim() != 4:  # no images
        return inputs
    height, width = (input_extent(chain, side, axis) for axis, side in enumerate(x.shape[2:]))
    if (height, width) == tuple(x.shape[2:]):
        return inputs
    return (x[:, :, :height, :width].contiguous(memory_format=torch.channels_last),)


def input_extent(chain: nn.Module, side: int, axis: int = 0) -> int:
    """The number of first rows (axis 0) or columns (axis 1) of an image that a chain's outputs depend on.

    >>> cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2))
    >>> input_extent(cnn, 32), input_extent(cnn, 30)  # 30 → 28 → 14 → 12 → 6
    (30, 30)
    """
    steps: list[Pair] = []
    size = side
    for layer in chain.children():
        if type(layer) is nn.Flatten:
            break
        if type(layer) is nn.ReLU:
            continue
        found = _step(layer, axis)
        if found is None:
            return side
        kernel, stride = found
        steps.append(found)
        size = (size - kernel) // stride + 1
    for kernel, stride in reversed(steps):
        size = (size - 1) * stride + kernel
    return size


def _step(layer: nn.Module, axis: int) -> Pair | None:
    """Kernel and stride of a layer without padding."""
    if type(layer) is nn.Conv2d and layer.padding == (0, 0) and layer.dilation == (1, 1):
        return layer.kernel_size[axis], layer.stride[axis]
    if type(layer) is nn.MaxPool2d:
        plain = (layer.padding, layer.dilation, layer.ceil_mode) == (0, 1, False)
        kernel, stride = layer.kernel_size, layer.stride
        if plain and isinstance(kernel, int) and isinstance(stride, int):
            return kernel, stride
    return None
