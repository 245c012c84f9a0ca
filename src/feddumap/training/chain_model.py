"""Models that the C kernels differentiate, for plain chains of layers on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import numpy as np
import torch

from feddumap.core.messages import Architecture, Tensors
from feddumap.core.tensors import same_form
from feddumap.errors import FeddumapError
from feddumap.models import build
from feddumap.training.convolutions import input_extent
from feddumap.training.kernels.chain import Chain, Images, chain_for
from feddumap.training.kernels.spec import ChainSpec, spec_of
from feddumap.training.model import Loss, Model, to_cpu
from feddumap.training.optimizers import TensorList
from feddumap.training.samples import Batch, Epoch, Samples

EVALUATION_BATCH = 20  # images per pass of an evaluation: few enough for the cache

ImageExtent = Callable[[int, int], tuple[int, int]]
"""The height and width of the part of an image that a chain's outputs depend on."""


class ChainModel(Model):
    """A plain chain, differentiated by the C kernels. Parameters and gradients are one flat tensor each."""

    def __init__(self, spec: ChainSpec, extent: ImageExtent, weights: Tensors) -> None:
        self._spec, self._extent = spec, extent
        self.names = [f"{layer.name}.{part}" for layer in spec.layers for part in ("weight", "bias")]
        self._shapes = [shape for layer in spec.layers for shape in (layer.weight_shape, (layer.outputs,))]
        self._size = sum(int(np.prod(shape)) for shape in self._shapes)
        self.parameters = [torch.empty(self._size)]
        self._grads = [torch.empty(self._size)]
        self._epoch: tuple[Epoch, Images] | None = None
        self._step: tuple[Epoch, Callable[[int, int], float]] | None = None
        self.load(weights)

    def zeros(self) -> TensorList:
        return [torch.zeros(self._size)]

    def filled(self, values: Mapping[str, torch.Tensor]) -> TensorList:
        group = [torch.empty(self._size)]
        for name, part in self.named(group).items():
            part.copy_(values[name])
        return group

    def named(self, group: TensorList) -> dict[str, torch.Tensor]:
        (flat,) = group
        parts = torch.split(flat, [int(np.prod(shape)) for shape in self._shapes])
        views = (part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))
        shaped = (view.permute(0, 3, 1, 2) if view.dim() == 4 else view for view in views)
        return dict(zip(self.names, shaped, strict=True))

    def gradients(self, batch: Batch, loss: Loss | None = None) -> TensorList:
        if loss is None:
            self._gradient_step(batch.epoch)(batch.start, batch.stop)
            return self._grads
        (parameters,), (grads,), epoch = self.parameters, self._grads, batch.epoch
        images = self._images(epoch)
        chain = self._chain(epoch.size, images)
        outputs = chain.forward(images, parameters, (batch.start, batch.stop)).requires_grad_()
        (output_grads,) = torch.autograd.grad(loss(outputs, batch.targets), outputs)
        chain.backward(output_grads.contiguous(), parameters, grads)
        return self._grads

    def summed_gradients(self, samples: Samples, shift: torch.Tensor | None = None) -> Iterator[TensorList]:
        images = Images(samples.inputs.contiguous(), labels=samples.targets, shift=shift)
        chain = self._chain(EVALUATION_BATCH, images)
        for span in evaluation_spans(len(samples)):
            chain.gradients(images, span, self.parameters[0], self._grads[0], scale=1.0)
            yield self._grads

    def outputs(self, images: torch.Tensor) -> torch.Tensor:
        checked = Images(images.contiguous())
        return self._chain(EVALUATION_BATCH, checked).forward(checked, self.parameters[0])

    def maps(self, layer: str, images: torch.Tensor) -> torch.Tensor:
        """The feature maps [n, c, h, w] of a convolution after its ReLU, before its pool."""
        spec = self._spec.maps_of(layer)
        checked = Images(images.contiguous())
        height, width, _ = checked.shape
        chain = chain_for(spec, EVALUATION_BATCH, (height, width))
        outputs = chain.forward(checked, self.parameters[0][: chain.parameters])
        return outputs.view(len(images), -1, *spec.sizes(height, width)[-1])

    def hessian(self, samples: Samples) -> Callable[[torch.Tensor], torch.Tensor]:
        """v ↦ H v for the mean cross-entropy over the samples, on flat vectors."""
        images = Images(samples.inputs.contiguous(), labels=samples.targets)
        height, width, _ = images.shape
        products = []
        for span in evaluation_spans(len(samples)):
            chain = Chain(self._spec, EVALUATION_BATCH, self._extent(height, width))
            products.append(chain.hessian(images, span, self.parameters[0], 1 / len(samples)))

        def product(vector: torch.Tensor) -> torch.Tensor:
            total, part = torch.zeros_like(vector), torch.empty_like(vector)
            for each in products:
                each(vector, part)
                total += part
            return total

        return product

    def weights(self) -> Tensors:
        return {name: to_cpu(tensor) for name, tensor in self.named(self.parameters).items()}

    def load(self, weights: Tensors) -> None:
        views = self.named(self.parameters)
        if not same_form(weights, views):
            raise FeddumapError(
                "the names or shapes of the weights differ from those of this network: load its own weights"
            )
        for name, view in views.items():
            view.copy_(weights[name])

    def _images(self, epoch: Epoch) -> Images:
        """The images of an epoch for the kernels, without labels; checked once."""
        if self._epoch is None or self._epoch[0] is not epoch:
            self._epoch = epoch, Images(epoch.source.stored, epoch.order, epoch.crops)
        return self._epoch[1]

    def _gradient_step(self, epoch: Epoch) -> Callable[[int, int], float]:
        """What computes the gradients of an epoch's batches; its arguments are checked once."""
        if self._step is None or self._step[0] is not epoch:
            images = Images(epoch.source.stored, epoch.order, epoch.crops, epoch.targets, epoch.shift)
            chain = self._chain(epoch.size, images)
            self._step = epoch, chain.gradient_step(images, self.parameters[0], self._grads[0])
        return self._step[1]

    def _chain(self, batch: int, images: Images) -> Chain:
        height, width, _ = images.shape
        return chain_for(self._spec, batch, self._extent(height, width))


def evaluation_spans(count: int) -> Iterator[tuple[int, int]]:
    """[0, count) in spans of EVALUATION_BATCH."""
    return ((start, min(start + EVALUATION_BATCH, count)) for start in range(0, count, EVALUATION_BATCH))


@lru_cache(maxsize=32)
def chain_spec(architecture: Architecture) -> tuple[ChainSpec, ImageExtent] | None:
    """An architecture as a chain, and the part of an image that it depends on; None if it is not a chain."""
    given = architecture.input
    if given.kind != "image" or given.mean:  # the kernels read bytes and scale them by 1/255
        return None
    built = build(architecture)
    spec = spec_of(built)
    channels, *sides = given.shape
    if spec is None or spec.layers[0].inputs != channels or not spec.fits(*sides):
        return None

    @lru_cache(maxsize=8)
    def extent(height: int, width: int) -> tuple[int, int]:
        return input_extent(built, height, 0), input_extent(built, width, 1)

    return spec, extent
