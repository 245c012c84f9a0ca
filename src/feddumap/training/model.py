"""The interface of models: named parameters, gradients and outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from feddumap.core.messages import Tensors
from feddumap.training.optimizers import TensorList
from feddumap.training.samples import Batch, Samples

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A loss function of outputs and targets."""


class Model(ABC):
    """A network with its weights. It is the `ParameterSpace` of an update rule."""

    names: list[str]
    parameters: TensorList

    @abstractmethod
    def zeros(self) -> TensorList: ...

    @abstractmethod
    def filled(self, values: Mapping[str, torch.Tensor]) -> TensorList: ...

    @abstractmethod
    def named(self, group: TensorList) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def gradients(self, batch: Batch, loss: Loss | None = None) -> TensorList:
        """∇ of the loss of a batch, by default cross-entropy of the outputs plus the `shift` of the epoch.
        The next call may overwrite the returned tensors."""

    @abstractmethod
    def summed_gradients(self, samples: Samples, shift: torch.Tensor | None = None) -> Iterator[TensorList]:
        """∇ of the summed cross-entropy of outputs + `shift` in eval mode, one chunk of samples at a time."""

    @abstractmethod
    def outputs(self, images: torch.Tensor) -> torch.Tensor:
        """The outputs for images [n, h, w, c] of bytes, in eval mode and without a graph."""

    @abstractmethod
    def weights(self) -> Tensors:
        """Contiguous copies of all parameters and buffers on the CPU."""

    @abstractmethod
    def load(self, weights: Tensors) -> None: ...

    def start(self) -> TensorList:
        return [tensor.detach().clone() for tensor in self.parameters]

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context in which the model is trained."""
        yield


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
