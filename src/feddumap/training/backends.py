"""The choice between torch and the C kernels for computing gradients."""

from __future__ import annotations

from typing import Literal

from torch import nn

from feddumap.core.messages import Architecture, Tensors
from feddumap.errors import FeddumapError
from feddumap.models import network
from feddumap.models.frozen import constants_of
from feddumap.system.callbacks import Say
from feddumap.training.chain_model import ChainModel, chain_spec
from feddumap.training.kernels import loader
from feddumap.training.model import Model
from feddumap.training.torch_model import TorchModel

Kernels = Literal["c", "torch"]


def as_model(given: Model | nn.Module) -> Model:
    """The model itself, or a `TorchModel` of a network."""
    return given if isinstance(given, Model) else TorchModel(given)


def choose_kernels(wanted: Kernels | None, architecture: Architecture, device: str, say: Say) -> Kernels:
    """The value of `train.kernels` for a run: as configured or, by default, `c` if the network is a plain
    chain on the CPU. If only the compiled kernels are missing, `say` reports it."""
    if wanted == "torch":
        return "torch"
    possible = device == "cpu" and chain_spec(architecture) is not None
    if wanted == "c":
        if not possible:
            raise FeddumapError(
                f"train.kernels = 'c' with {architecture.family} on {device}: the kernels support only plain "
                "chains of convolutions and linear layers on the CPU; leave the key out, or set it to torch"
            )
        loader.require()
        return "c"
    if possible and isinstance(found := loader.find(), str):
        say(
            f"training with torch, several times slower than with the kernels in C ({found}): {loader.REMEDY}"
        )
        return "torch"
    return "c" if possible else "torch"


def make_model(
    architecture: Architecture, weights: Tensors, kernels: Kernels | None, device: str = "cpu"
) -> Model:
    """A model of an architecture with a copy of these weights; `kernels` is `train.kernels`."""
    if kernels == "c":
        chain = chain_spec(architecture)
        assert chain is not None, "the network is not a chain"
        return ChainModel(*chain, weights)
    return TorchModel(network(architecture, weights).to(device), constants_of(architecture))
