"""Equal networks of several devices that take their steps together.

Five steps of LeNet5 in one take about as long as three alone; larger networks gain little. A device's numbers
are those it gets alone, to rounding, and do not depend on the other devices in the stack.

>>> from feddumap.models import architecture, initialise, network
>>> lenet = architecture("lenet", classes=10)
>>> stack = Stack([network(lenet, initialise(lenet, seed)) for seed in (1, 2)])
>>> [tuple(parameter.shape) for parameter in stack.parameters[:2]]  # 6 channels a device, padded to 8
[(16, 4, 5, 5), (16,)]
>>> stack.gradients([torch.rand(10, 3, 32, 32)] * 2, [torch.arange(10)] * 2)[0].shape
torch.Size([16, 4, 5, 5])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from feddumap.device.training import Group

Layer = Callable[[torch.Tensor], torch.Tensor]

# oneDNN's grouped convolutions are several times slower at widths that do not fill its vectors
_INPUT_MULTIPLE, _WIDTH_MULTIPLE = 4, 8


def stackable(network: nn.Module) -> bool:
    """Whether it is a plain chain: convolutions, ReLU and max-pools, one flattening, linear layers and ReLU,
    with trainable float32 weights on the CPU that no two layers share."""
    if type(network) is not nn.Sequential:
        return False
    layers, parameters = list(network), list(network.parameters())
    flat = [type(layer) for layer in layers].index(nn.Flatten) if _count(layers, nn.Flatten) == 1 else 0
    return (
        _count(layers[:flat], nn.Conv2d) > 0
        and all(_is_plain(layer, nn.Conv2d, nn.ReLU, nn.MaxPool2d) for layer in layers[:flat])
        and all(_is_plain(layer, nn.Flatten, nn.ReLU, nn.Linear) for layer in layers[flat:])
        and len(parameters) == 2 * (_count(layers, nn.Conv2d) + _count(layers, nn.Linear))
        and all(p.requires_grad and p.dtype == torch.float32 and p.device.type == "cpu" for p in parameters)
    )


def _count(layers: Sequence[nn.Module], kind: type[nn.Module]) -> int:
    return sum(type(layer) is kind for layer in layers)


def _is_plain(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether it is of one of these kinds, not of a subclass that may do something else, and simple."""
    simple = type(layer) in kinds
    if isinstance(layer, nn.Conv2d):
        simple &= layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    elif isinstance(layer, nn.MaxPool2d):
        simple &= not layer.return_indices
    elif isinstance(layer, nn.Flatten):
        simple &= (layer.start_dim, layer.end_dim) == (1, -1)
    return simple


class Stack:
    """Equal chains of several devices that take their steps together.

    Convolutions become one with a group for each device, linear layers one batched product. Channels are
    padded with zeros to widths that are fast. The gradients of the padding are exactly zero, so it stays zero
    under every rule that leaves a zero with a gradient of zero where it is.
    """

    parameters: Group
    """The stacked parameters, in the order of `named_parameters`: leaves, updated in place by the caller."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """Copies the weights: the networks are left alone."""
        chain = networks[0]
        assert isinstance(chain, nn.Sequential)
        assert all(stackable(network) for network in networks), "only plain chains can be stacked"
        assert len({str(network) for network in networks}) == 1, "only equal networks can be stacked"
        self._devices = len(networks)
        self._shapes = [parameter.shape for parameter in chain.parameters()]
        self._padded: list[tuple[int, ...]] = []  # shapes of one device's part
        self._layers: list[Layer] = []
        self._buffers: dict[torch.Size, tuple[torch.Tensor, Group]] = {}
        self.parameters = []
        width = padded = 0  # of the last convolution so far
        for layer in chain:
            if isinstance(layer, nn.Conv2d):
                inputs = padded or _round_up(layer.in_channels, _INPUT_MULTIPLE)
                width, padded = layer.out_channels, _round_up(layer.out_channels, _WIDTH_MULTIPLE)
                self._layers.append(self._convolution(layer, inputs, padded))
            elif isinstance(layer, nn.Linear):
                self._layers.append(self._linear(layer))
            elif isinstance(layer, nn.Flatten):
                self._layers.append(self._flatten(width))
            else:
                self._layers.append(layer if isinstance(layer, nn.MaxPool2d) else torch.relu)
        self._fill(self.parameters, [list(network.parameters()) for network in networks])
        for parameter in self.parameters:
            parameter.requires_grad_()

    def gradients(self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Group:
        """∇ of each device's mean cross-entropy on its batch [B, c, h, w], stacked; B is the same for all."""
        shapes = {(batch.shape, labels.shape) for batch, labels in zip(inputs, targets, strict=True)}
        assert len(shapes) == 1, "the devices' batches differ in shape"
        x, places = self._buffer(inputs[0].shape)
        torch._foreach_copy_(places, list(inputs))
        for layer in self._layers:
            x = layer(x)
        loss = F.cross_entropy(x.flatten(0, 1), torch.cat(list(targets)), reduction="sum") / len(targets[0])
        return list(torch.autograd.grad(loss, self.parameters))

    def gather(self, tensors: Sequence[Sequence[torch.Tensor]]) -> Group:
        """Each device's tensors, one for each parameter and shaped like it, stacked like `parameters`."""
        group = [torch.zeros_like(parameter, requires_grad=False) for parameter in self.parameters]
        self._fill(group, tensors)
        return group

    def scatter(self, group: Group, into: Sequence[Sequence[torch.Tensor]]) -> None:
        """The reverse of `gather`: writes each device's part of a stacked group into its tensors."""
        with torch.no_grad():
            for part, tensors in self._parts(group, into):
                torch._foreach_copy_(tensors, part)

    def _fill(self, group: Group, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        with torch.no_grad():
            for part, given in self._parts(group, tensors):
                torch._foreach_copy_(part, given)

    def _parts(self, group: Group, beside: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[Group, Group]]:
        """Each device's part of a stacked group, as views without the padding, and its own tensors."""
        assert len(beside) == self._devices, f"{len(beside)} devices instead of {self._devices}"
        for device, tensors in enumerate(beside):
            assert [tensor.shape for tensor in tensors] == self._shapes, (
                "a copy would stretch a smaller tensor"
            )
            part = [
                stacked.view(self._devices, *padded)[device][tuple(map(slice, shape))]
                for stacked, padded, shape in zip(group, self._padded, self._shapes, strict=True)
            ]
            yield part, list(tensors)

    def _convolution(self, layer: nn.Conv2d, inputs: int, outputs: int) -> Layer:
        weight = torch.zeros(self._devices * outputs, inputs, *layer.kernel_size)
        weight = weight.contiguous(memory_format=torch.channels_last)
        bias = torch.zeros(self._devices * outputs)
        self.parameters += [weight, bias]
        self._padded += [(outputs, *weight.shape[1:]), (outputs,)]
        stride, padding = layer.stride, layer.padding
        return lambda x: F.conv2d(x, weight, bias, stride, padding, groups=self._devices)

    def _linear(self, layer: nn.Linear) -> Layer:
        """Its weights [devices, out, in] lie in memory as [devices, in, out]: so do their gradients, and an
        update that need not transpose them is faster."""
        weight = torch.zeros(self._devices, layer.in_features, layer.out_features).transpose(1, 2)
        bias = torch.zeros(self._devices, 1, layer.out_features)
        self.parameters += [weight, bias]
        self._padded += [tuple(weight.shape[1:]), (layer.out_features,)]
        return lambda x: torch.baddbmm(bias, x, weight.transpose(1, 2))

    def _flatten(self, width: int) -> Layer:
        """[B, devices · padded width, h, w] to [devices, B, features], channel by channel."""
        split = (self._devices, -1)
        return lambda x: x.view(len(x), *split, *x.shape[2:])[:, :, :width].flatten(2).transpose(0, 1)

    def _buffer(self, shape: torch.Size) -> tuple[torch.Tensor, Group]:
        """A stacked input, channels-last and kept from step to step, and each device's place in it."""
        if shape not in self._buffers:
            batch, channels, height, width = shape
            assert channels == self._shapes[0][1], "the padding would hide missing channels"
            padded = _round_up(channels, _INPUT_MULTIPLE)
            memory = torch.zeros(batch, height, width, self._devices, padded)
            places = [memory[..., device, :channels].permute(0, 3, 1, 2) for device in range(self._devices)]
            self._buffers[shape] = memory.flatten(3).permute(0, 3, 1, 2), places
        return self._buffers[shape]


def _round_up(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple
