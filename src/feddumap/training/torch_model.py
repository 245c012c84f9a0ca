"""Models that torch differentiates, for any network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from feddumap.core.messages import Tensors
from feddumap.models.state import load_state, state_of, trainable
from feddumap.training.convolutions import fast_convolutions
from feddumap.training.model import Loss, Model, to_cpu
from feddumap.training.optimizers import TensorList
from feddumap.training.samples import Batch, Samples, to_input

CHUNK = 250  # samples per backward pass of a full gradient


class TorchModel(Model):
    """Any network, differentiated by torch. Its parameters are those that require gradients; `constants` are
    no part of its weights."""

    def __init__(self, net: nn.Module, constants: Mapping[str, torch.Tensor] | None = None) -> None:
        self.network = net
        self._constants = constants or {}
        named = trainable(net)
        self.names = list(named)
        self.parameters: TensorList = list(named.values())

    def zeros(self) -> TensorList:
        return [torch.zeros_like(parameter, requires_grad=False) for parameter in self.parameters]

    def filled(self, values: Mapping[str, torch.Tensor]) -> TensorList:
        pairs = zip(self.names, self.parameters, strict=True)
        return [torch.empty_like(p, requires_grad=False).copy_(values[name]) for name, p in pairs]

    def named(self, group: TensorList) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, group, strict=True))

    def gradients(self, batch: Batch, loss: Loss | None = None) -> TensorList:
        inputs, targets = batch
        outputs = self.network(inputs)
        if loss:
            value = loss(outputs, targets)
        else:
            value = F.cross_entropy(_add_shift(outputs, batch.epoch.shift), targets)
        return self.derivatives(value)

    def summed_gradients(self, samples: Samples, shift: torch.Tensor | None = None) -> Iterator[TensorList]:
        self.network.eval()
        for start in range(0, len(samples), CHUNK):
            part = slice(start, start + CHUNK)
            outputs = self.network(to_input(samples.inputs[part]))
            loss = F.cross_entropy(_add_shift(outputs, shift), samples.targets[part], reduction="sum")
            yield self.derivatives(loss)

    def derivatives(self, value: torch.Tensor, *, create_graph: bool = False) -> TensorList:
        """∂value by each parameter: zero for those that it does not depend on."""
        found = torch.autograd.grad(value, self.parameters, create_graph=create_graph, materialize_grads=True)
        return list(found)

    def outputs(self, images: torch.Tensor) -> torch.Tensor:
        training = self.network.training
        self.network.eval()
        with torch.inference_mode(), fast_convolutions(self.network):
            outputs: torch.Tensor = self.network(to_input(images))
        self.network.train(training)
        return outputs

    def weights(self) -> Tensors:
        state = state_of(self.network)
        return {name: to_cpu(tensor) for name, tensor in state.items() if name not in self._constants}

    def load(self, weights: Tensors) -> None:
        load_state(self.network, weights, self._constants)

    @contextmanager
    def training(self) -> Iterator[None]:
        self.network.train()
        with fast_convolutions(self.network):
            yield


def _add_shift(outputs: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    return outputs if shift is None else outputs + shift
