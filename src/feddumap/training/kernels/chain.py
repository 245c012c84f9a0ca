"""Python interface of the C kernels, which checks their arguments."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from feddumap.training.kernels.loader import Library, require
from feddumap.training.kernels.spec import LARGEST_KERNEL, MOST_LAYERS, ChainSpec, LayerSpec

AUTOMATIC, DIRECT, WINOGRAD, DOTS = -1, 0, 1, 2
"""Algorithms of a convolution; AUTOMATIC chooses the fastest for each layer."""

MAX_CROP_OFFSET = 2**20  # pixels
CACHED_CHAINS = 6  # per thread


def check(fine: bool, expected: str) -> None:
    """Raise a ValueError unless an argument is valid, also under `python -O`."""
    if not fine:
        raise ValueError(f"the kernels expected {expected}")


class Images:
    """Arguments of the kernels, checked once: images as bytes [n, h, w, c], their order, crops
    (`augment.Crops`) and labels, and the shift added to the outputs before cross-entropy."""

    def __init__(
        self,
        source: torch.Tensor,
        order: np.ndarray | None = None,
        crops: np.ndarray | None = None,
        labels: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
    ) -> None:
        check(
            source.dtype == torch.uint8
            and source.dim() == 4
            and source.is_contiguous()
            and source.device.type == "cpu",
            f"contiguous bytes [n, h, w, c] on the CPU, not {source.dtype} {tuple(source.shape)} on "
            f"{source.device}",
        )
        index = np.arange(len(source)) if order is None else order
        check(index.ndim == 1 and len(index) > 0, "at least one image")
        check(index.dtype.kind in "iu", f"images by their numbers, not by {index.dtype}")
        index = np.ascontiguousarray(index, dtype=np.int64)
        check(int(index.min()) >= 0 and int(index.max()) < len(source), f"images 0 to {len(source) - 1}")
        if crops is not None:
            check(crops.shape == (len(index), 3), "a crop of three numbers for each image")
            check(crops.dtype.kind in "iu", f"crops of whole numbers, not of {crops.dtype}")
            near = int(crops.min()) >= -MAX_CROP_OFFSET and int(crops.max()) <= MAX_CROP_OFFSET
            check(near, f"crop offsets of at most {MAX_CROP_OFFSET} pixels")
            crops = np.ascontiguousarray(crops, dtype=np.int32)
        self.shape = tuple(source.shape[1:])
        self.top_label = -1
        if labels is not None:
            labels = labels.contiguous()
            check(labels.dtype == torch.int64 and labels.device.type == "cpu", "labels of 64 bits on the CPU")
            check(labels.shape == (len(index),), "a label for each image")
            check(int(labels.min()) >= 0, "labels that are not negative")
            self.top_label = int(labels.max())
        if shift is not None:
            shift = shift.contiguous()
            check(
                shift.dtype == torch.float32 and shift.dim() == 1 and shift.device.type == "cpu",
                "a float32 shift for each class on the CPU",
            )
        self._shifted = None if shift is None else len(shift)
        self._owners = source, index, crops, labels, shift  # own the memory of the pointers below
        self._source = source.data_ptr()
        self._index = index.ctypes.data
        self._crops = None if crops is None else crops.ctypes.data
        self._labels = None if labels is None else labels.data_ptr()
        self._shift = None if shift is None else shift.data_ptr()
        self._count = len(index)

    def __len__(self) -> int:
        return self._count

    def arguments(self, start: int, stop: int) -> tuple[int, int, int, int, int, int | None]:
        """The arguments of the kernels for the images [start, stop)."""
        check(0 <= start < stop <= self._count, f"some of {self._count} images, not {start} to {stop}")
        height, width, _ = self.shape
        crops = None if self._crops is None else self._crops + 12 * start
        return stop - start, self._source, height, width, self._index + 8 * start, crops

    def labels(self, start: int, classes: int) -> int:
        """The address of the labels from `start` on."""
        check(self._labels is not None and self.top_label < classes, f"labels below {classes}")
        return (self._labels or 0) + 8 * start

    def shift(self, classes: int) -> int | None:
        """The address of the shift, or None."""
        check(self._shifted in (None, classes), f"a shift for each of {classes} classes")
        return self._shift


class Chain:
    """A chain of layers with buffers for batches of up to `batch` images, of which it reads height × width.

    Parameters and gradients are flat float32 tensors of `parameters` numbers: each layer's weight
    (convolutions as [output, row, column, input]), then its bias. One thread at a time may use a chain.
    """

    def __init__(
        self,
        spec: ChainSpec,
        batch: int,
        size: tuple[int, int],
        algorithm: int = AUTOMATIC,
        library: Library | None = None,
    ) -> None:
        height, width = size
        check(batch >= 1, f"a batch of at least one image, not {batch}")
        check(spec.fits(height, width), f"images that go through the chain, not {height}×{width}")
        self.spec, self.batch, self.size = spec, batch, size
        self.parameters = sum(math.prod(layer.weight_shape) + layer.outputs for layer in spec.layers)
        maps = spec.sizes(height, width)
        last = spec.layers[-1]
        self.outputs = last.outputs * (math.prod(maps[-1]) if last.kernel else 1)
        self._check_sizes(maps)
        numbers = [
            number
            for layer in spec.layers
            for number in layer.encode(self._supported(layer, maps, algorithm))
        ]
        self._calls = (library or require()).calls
        pointer = self._calls.fdm_create(
            len(spec.layers), (ctypes.c_int32 * len(numbers))(*numbers), batch, height, width
        )
        if not pointer:
            raise MemoryError(f"out of memory for the buffers of a chain with {self.parameters:,} parameters")
        self._pointer = ctypes.c_void_p(pointer)
        self._free: Callable[[Any], None] = self._calls.fdm_destroy

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._free(self._pointer)

    def gradients(
        self,
        images: Images,
        span: tuple[int, int],
        parameters: torch.Tensor,
        grads: torch.Tensor,
        scale: float = 0.0,
    ) -> float:
        """∇ of a batch's mean cross-entropy into `grads` (or of `scale` · its sum); returns the summed
        loss."""
        return self.gradient_step(images, parameters, grads, scale)(*span)

    def gradient_step(
        self, images: Images, parameters: torch.Tensor, grads: torch.Tensor, scale: float = 0.0
    ) -> Callable[[int, int], float]:
        """`gradients` as a function of the batch's start and stop. All other arguments are checked once, and
        the tensors must not be resized while it is in use."""
        check(self.spec.layers[-1].kernel is None, "a chain that ends in a linear layer")
        self._check_images(images)
        self._check_flat(parameters, grads)
        call, pointer, batch = self._calls.fdm_gradients, self._pointer, self.batch
        labels, shift = images.labels(0, self.outputs), images.shift(self.outputs)
        flat, into = parameters.data_ptr(), grads.data_ptr()

        def step(start: int, stop: int, _owners: tuple[object, ...] = (self, parameters, grads)) -> float:
            check(stop - start <= batch, f"a batch of at most {batch}")
            where = images.arguments(start, stop)
            return float(call(pointer, *where, labels + 8 * start, shift, scale, flat, into))

        return step

    def forward(
        self, images: Images, parameters: torch.Tensor, span: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """The outputs for all images, or one batch: logits [n, classes], or feature maps [n, channels ·
        places]."""
        span = span or (0, len(images))
        self._check_images(images)
        self._check_flat(parameters)
        outputs = torch.empty(span[1] - span[0], self.outputs)
        self._calls.fdm_outputs(
            self._pointer, *images.arguments(*span), parameters.data_ptr(), outputs.data_ptr()
        )
        return outputs

    def backward(self, output_grads: torch.Tensor, parameters: torch.Tensor, grads: torch.Tensor) -> None:
        """Write ∇ into `grads`, given the gradient of the outputs of the last `forward`, which had one
        batch."""
        self._check_flat(parameters, grads)
        count = len(output_grads)
        check(1 <= count <= self.batch, f"a batch of at most {self.batch}, not {count}")
        check(self.spec.layers[-1].kernel is None, "a chain that ends in a linear layer")
        check(
            output_grads.shape == (count, self.outputs)
            and output_grads.dtype == torch.float32
            and output_grads.is_contiguous()
            and output_grads.device.type == "cpu",
            f"contiguous float32 gradients [{count}, {self.outputs}]",
        )
        self._calls.fdm_backward(
            self._pointer, count, output_grads.data_ptr(), parameters.data_ptr(), grads.data_ptr()
        )

    def hessian(
        self, images: Images, span: tuple[int, int], parameters: torch.Tensor, scale: float
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """A function that writes H·v into its second argument, H being the Hessian of `scale` · the summed
        loss of one batch. The chain must not be used otherwise while the function is in use."""
        self.gradients(images, span, parameters, torch.empty_like(parameters), scale)
        count = span[1] - span[0]
        if not self._calls.fdm_hessian_start(self._pointer, count):
            raise MemoryError(f"out of memory for Hessian products with {self.parameters:,} parameters")

        def product(vector: torch.Tensor, into: torch.Tensor) -> None:
            self._check_flat(vector, into)
            self._calls.fdm_hessian_product(
                self._pointer, count, scale, parameters.data_ptr(), vector.data_ptr(), into.data_ptr()
            )

        return product

    def _check_sizes(self, maps: list[tuple[int, int]]) -> None:
        """The limits of the C code: number of layers, kernel size, and 32-bit offsets."""
        check(len(self.spec.layers) <= MOST_LAYERS, f"at most {MOST_LAYERS} layers")
        for layer in self.spec.layers:
            check(min(layer.inputs, layer.outputs) > 0, "layers that are not empty")
            check(
                math.prod(layer.kernel or ()) <= LARGEST_KERNEL, f"kernels of up to {LARGEST_KERNEL} numbers"
            )
        channels, height, width = self.spec.layers[0].inputs, *self.size
        for layer, after in zip(self.spec.layers, maps, strict=False):
            rows, columns = height + 2 * layer.padding[0], width + 2 * layer.padding[1]
            check((channels + 7) * rows * columns * self.batch * 4 < 2**31, "a smaller batch")
            channels, (height, width) = layer.outputs, after
        check((channels + 7) * height * width * self.batch * 16 < 2**31, "a smaller batch")

    def _supported(self, layer: LayerSpec, maps: list[tuple[int, int]], algorithm: int) -> int:
        """The given algorithm if the layer supports it."""
        if layer.kernel is None or algorithm == AUTOMATIC:
            return AUTOMATIC
        index = self.spec.layers.index(layer)
        even = all(side * (2 if layer.pool else 1) % 2 == 0 for side in maps[index])
        allowed = {
            DIRECT: True,
            WINOGRAD: layer.kernel == (3, 3) and even and index > 0,
            DOTS: layer.inputs % 8 == 0,
        }
        return algorithm if allowed[algorithm] else DIRECT

    def _check_images(self, images: Images) -> None:
        height, width, channels = images.shape
        check(
            channels == self.spec.layers[0].inputs, f"{self.spec.layers[0].inputs} channels, not {channels}"
        )
        check(
            height >= self.size[0] and width >= self.size[1],
            f"images of at least {self.size[0]}×{self.size[1]}, not {height}×{width}",
        )

    def _check_flat(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            check(
                tensor.shape == (self.parameters,)
                and tensor.dtype == torch.float32
                and tensor.is_contiguous()
                and tensor.device.type == "cpu",
                f"{self.parameters} float32 numbers in a row on the CPU",
            )


_chains = threading.local()


def chain_for(spec: ChainSpec, batch: int, size: tuple[int, int]) -> Chain:
    """The chain of a network for batches of this size, from a cache of this thread."""
    cache: dict[Any, Chain] = _chains.__dict__.setdefault("cache", {})
    key = spec, batch, size
    chain = cache.pop(key, None) or Chain(spec, batch, size)
    cache[key] = chain  # most recently used last
    while len(cache) > CACHED_CHAINS:
        del cache[next(iter(cache))]
    return chain
