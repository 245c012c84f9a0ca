"""A network with its weights, ready to train and to evaluate: by torch, or by the kernels where it is a
plain chain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from feddumap.core.messages import Architecture, Tensors
from feddumap.core.tensors import same_form
from feddumap.errors import FeddumapError
from feddumap.models import INPUT_SHAPE, build, network
from feddumap.training.convolutions import fast_convolutions, seen
from feddumap.training.kernels import library
from feddumap.training.kernels.chain import Chain, Images, chain_for
from feddumap.training.kernels.spec import Spec, spec_of
from feddumap.training.optimizers import Group
from feddumap.training.samples import Batch, Epoch, Samples, to_input

Kernels = Literal["c", "torch"]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of outputs and targets."""

CHUNK = 250  # samples of a full gradient that are differentiated at once
EVALUATED = 20  # images that the kernels evaluate at once: they stay in the cache


class Model(ABC):
    """Named parameters, their gradients, and outputs. It is the `Space` in which a rule updates them."""

    names: list[str]
    parameters: Group

    @abstractmethod
    def zeros(self) -> Group: ...

    @abstractmethod
    def filled(self, values: Mapping[str, torch.Tensor]) -> Group: ...

    @abstractmethod
    def named(self, group: Group) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def gradients(self, batch: Batch, loss: Loss | None = None) -> Group:
        """∇ of the batch's loss; if none is given, of cross-entropy on the outputs plus the epoch's `shift`.
        The kernels' are overwritten by the next call."""

    @abstractmethod
    def summed_gradients(self, samples: Samples, shift: torch.Tensor | None = None) -> Iterator[Group]:
        """∇ of the summed cross-entropy on outputs + `shift`, in eval mode, chunk by chunk."""

    @abstractmethod
    def outputs(self, images: torch.Tensor) -> torch.Tensor:
        """What the network says to images of bytes, in eval mode and without a graph."""

    @abstractmethod
    def weights(self) -> Tensors:
        """Copies of all parameters and buffers, on the CPU and laid out in the ordinary way."""

    @abstractmethod
    def load(self, weights: Tensors) -> None: ...

    def start(self) -> Group:
        return [tensor.detach().clone() for tensor in self.parameters]

    @contextmanager
    def training(self) -> Iterator[None]:
        """Within it the model is trained."""
        yield


class TorchModel(Model):
    """Any network, differentiated by torch."""

    def __init__(self, net: nn.Module) -> None:
        self.network = net
        named = dict(net.named_parameters())
        self.names = list(named)
        self.parameters = list(named.values())

    def zeros(self) -> Group:
        return [torch.zeros_like(parameter, requires_grad=False) for parameter in self.parameters]

    def filled(self, values: Mapping[str, torch.Tensor]) -> Group:
        pairs = zip(self.names, self.parameters, strict=True)
        return [torch.empty_like(p, requires_grad=False).copy_(values[name]) for name, p in pairs]

    def named(self, group: Group) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, group, strict=True))

    def gradients(self, batch: Batch, loss: Loss | None = None) -> Group:
        inputs, targets = batch
        outputs = self.network(inputs)
        value = (
            loss(outputs, targets) if loss else F.cross_entropy(shifted(outputs, batch.epoch.shift), targets)
        )
        return list(torch.autograd.grad(value, self.parameters))

    def summed_gradients(self, samples: Samples, shift: torch.Tensor | None = None) -> Iterator[Group]:
        self.network.eval()
        for start in range(0, len(samples), CHUNK):
            part = slice(start, start + CHUNK)
            outputs = self.network(to_input(samples.images[part]))
            loss = F.cross_entropy(shifted(outputs, shift), samples.labels[part], reduction="sum")
            yield list(torch.autograd.grad(loss, self.parameters))

    def outputs(self, images: torch.Tensor) -> torch.Tensor:
        training = self.network.training
        self.network.eval()
        with torch.inference_mode(), fast_convolutions(self.network):
            found: torch.Tensor = self.network(to_input(images))
        self.network.train(training)
        return found

    def weights(self) -> Tensors:
        return {name: plain(tensor) for name, tensor in self.network.state_dict().items()}

    def load(self, weights: Tensors) -> None:
        self.network.load_state_dict(weights)

    @contextmanager
    def training(self) -> Iterator[None]:
        self.network.train()
        with fast_convolutions(self.network):
            yield


class ChainModel(Model):
    """A plain chain, differentiated by the kernels. Parameters and gradients are one flat tensor each."""

    def __init__(self, spec: Spec, seen_by: Callable[[int, int], tuple[int, int]], weights: Tensors) -> None:
        self._spec, self._seen = spec, seen_by
        self.names = [f"{layer.name}.{part}" for layer in spec.layers for part in ("weight", "bias")]
        self._shapes = [shape for layer in spec.layers for shape in (layer.weight_shape, (layer.outputs,))]
        self._size = sum(int(np.prod(shape)) for shape in self._shapes)
        self.parameters = [torch.empty(self._size)]
        self._grads = [torch.empty(self._size)]
        self._epoch: tuple[Epoch, Images] | None = None
        self.load(weights)

    def zeros(self) -> Group:
        return [torch.zeros(self._size)]

    def filled(self, values: Mapping[str, torch.Tensor]) -> Group:
        group = [torch.empty(self._size)]
        for name, part in self.named(group).items():
            part.copy_(values[name])
        return group

    def named(self, group: Group) -> dict[str, torch.Tensor]:
        (flat,) = group
        parts = torch.split(flat, [int(np.prod(shape)) for shape in self._shapes])
        views = (part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))
        shaped = (view.permute(0, 3, 1, 2) if view.dim() == 4 else view for view in views)
        return dict(zip(self.names, shaped, strict=True))

    def gradients(self, batch: Batch, loss: Loss | None = None) -> Group:
        (parameters,), (grads,) = self.parameters, self._grads
        epoch, span = batch.epoch, (batch.start, batch.stop)
        images = self._images(epoch, with_labels=loss is None)
        chain = self._chain(epoch.size, images)
        if loss is None:
            chain.gradients(images, span, parameters, grads)
            return self._grads
        outputs = chain.forward(images, parameters, span).requires_grad_()
        (wanted,) = torch.autograd.grad(loss(outputs, batch.targets), outputs)
        chain.backward(wanted.contiguous(), parameters, grads)
        return self._grads

    def summed_gradients(self, samples: Samples, shift: torch.Tensor | None = None) -> Iterator[Group]:
        images = Images(samples.images.contiguous(), labels=samples.labels, shift=shift)
        chain = self._chain(EVALUATED, images)
        for span in spans(len(samples)):
            chain.gradients(images, span, self.parameters[0], self._grads[0], scale=1.0)
            yield self._grads

    def outputs(self, images: torch.Tensor) -> torch.Tensor:
        checked = Images(images.contiguous())
        return self._chain(EVALUATED, checked).forward(checked, self.parameters[0])

    def maps(self, layer: str, images: torch.Tensor) -> torch.Tensor:
        """The feature maps [n, c, h, w] of a convolution behind its ReLU, before its pool."""
        spec = self._spec.maps_of(layer)
        checked = Images(images.contiguous())
        height, width, _ = checked.shape
        chain = chain_for(spec, EVALUATED, (height, width))
        found = chain.forward(checked, self.parameters[0][: chain.parameters])
        return found.view(len(images), -1, *spec.sizes(height, width)[-1])

    def hessian(self, samples: Samples) -> Callable[[torch.Tensor], torch.Tensor]:
        """v ↦ H v for the mean cross-entropy over the samples, on flat vectors."""
        images = Images(samples.images.contiguous(), labels=samples.labels)
        height, width, _ = images.shape
        products = []
        for span in spans(len(samples)):
            chain = Chain(self._spec, EVALUATED, self._seen(height, width))
            products.append(chain.hessian(images, span, self.parameters[0], 1 / len(samples)))

        def product(vector: torch.Tensor) -> torch.Tensor:
            total, part = torch.zeros_like(vector), torch.empty_like(vector)
            for each in products:
                each(vector, part)
                total += part
            return total

        return product

    def weights(self) -> Tensors:
        return {name: plain(tensor) for name, tensor in self.named(self.parameters).items()}

    def load(self, weights: Tensors) -> None:
        views = self.named(self.parameters)
        if not same_form(weights, views):
            raise FeddumapError("the weights are not those of this network: names or shapes differ")
        for name, view in views.items():
            view.copy_(weights[name])

    def _images(self, epoch: Epoch, *, with_labels: bool) -> Images:
        """The epoch for the kernels, checked once."""
        if self._epoch is None or self._epoch[0] is not epoch:
            labels = epoch.targets if with_labels else None
            self._epoch = epoch, Images(epoch.pictures.bytes, epoch.order, epoch.crops, labels, epoch.shift)
        return self._epoch[1]

    def _chain(self, batch: int, images: Images) -> Chain:
        height, width, _ = images.shape
        return chain_for(self._spec, batch, self._seen(height, width))


def shifted(outputs: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    return outputs if shift is None else outputs + shift


def spans(count: int) -> Iterator[tuple[int, int]]:
    """[0, count) in stretches of EVALUATED."""
    return ((start, min(start + EVALUATED, count)) for start in range(0, count, EVALUATED))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, laid out in the ordinary way."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def as_model(given: Model | nn.Module) -> Model:
    """A plain network is trained by torch."""
    return given if isinstance(given, Model) else TorchModel(given)


@lru_cache(maxsize=32)
def chain_of(architecture: Architecture) -> tuple[Spec, Callable[[int, int], tuple[int, int]]] | None:
    """The architecture as a chain and how much of an image that sees; None if it is not one."""
    built = build(architecture)
    spec = spec_of(built)
    if spec is None or not spec.fits(*INPUT_SHAPE[2:]):
        return None

    @lru_cache(maxsize=8)
    def seen_by(height: int, width: int) -> tuple[int, int]:
        return seen(built, height, 0), seen(built, width, 1)

    return spec, seen_by


def choose_kernels(
    wanted: Kernels | None, architecture: Architecture, device: str, say: Callable[[str], None]
) -> Kernels:
    """What computes a run's gradients: as wanted, or the kernels in C where they can, which is said where
    only the installation stands in the way."""
    if wanted == "torch":
        return "torch"
    possible = device == "cpu" and chain_of(architecture) is not None
    if wanted == "c":
        if not possible:
            raise FeddumapError(
                f"train.kernels = 'c' with {architecture.family} on {device}: the kernels train plain "
                f"chains of "
                "convolutions and linear layers on the CPU only; leave the key out, or set it to torch"
            )
        library.require()
        return "c"
    if possible and isinstance(found := library.find(), str):
        say(
            f"training with torch, several times slower than with the kernels in C ({found}): "
            f"{library.REMEDY}"
        )
        return "torch"
    return "c" if possible else "torch"


def make(architecture: Architecture, weights: Tensors, kernels: Kernels | None, device: str = "cpu") -> Model:
    """The model of an architecture with these weights, copied; `kernels` is `train.kernels`."""
    if kernels == "c":
        chain = chain_of(architecture)
        assert chain is not None, "kernels were chosen for a network that is no chain"
        return ChainModel(*chain, weights)
    return TorchModel(network(architecture, weights).to(device))
