"""The spectrum of a network's Hessian from a few Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Steps, ignore
from feddumap.training.backends import as_model
from feddumap.training.chain_model import ChainModel
from feddumap.training.model import Model
from feddumap.training.samples import Samples, to_input
from feddumap.training.torch_model import TorchModel

Product = Callable[[torch.Tensor], torch.Tensor]


class Spectrum(NamedTuple):
    """Ritz values, ascending, and the weight of each: the probe's squared component along its vector."""

    values: np.ndarray
    weights: np.ndarray


def loss_of(network: nn.Module, samples: Samples) -> torch.Tensor:
    """Mean cross-entropy in eval mode, which does not change batch-norm statistics."""
    return F.cross_entropy(network.eval()(to_input(samples.inputs)), samples.targets)


def flat(tensors: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> torch.Tensor:
    """The concatenation of tensors in logical order, whatever their memory layout."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def to_coordinates(model: Model | nn.Module, vector: torch.Tensor) -> torch.Tensor:
    """A vector over all parameters in logical order, in the coordinates of `hessian`."""
    made = as_model(model)
    shapes = {name: tensor.shape for name, tensor in made.named(made.parameters).items()}
    parts = torch.split(vector, [shape.numel() for shape in shapes.values()])
    return flat(
        made.filled({n: part.view(shape) for (n, shape), part in zip(shapes.items(), parts, strict=True)})
    )


def hessian(model: Model | nn.Module, samples: Samples) -> Product:
    """v ↦ H v, where H is the Hessian of the mean loss over all parameters.

    The kernels differentiate forward over backward. With torch the graph of the gradient is built once and
    differentiated again for each product.
    """
    made = as_model(model)
    if isinstance(made, ChainModel):
        return made.hessian(samples)
    assert isinstance(made, TorchModel)
    parameters = made.parameters
    grads = made.derivatives(loss_of(made.network, samples), create_graph=True)
    sizes = [parameter.numel() for parameter in parameters]

    def product(vector: torch.Tensor) -> torch.Tensor:
        parts = [
            part.view_as(parameter)
            for part, parameter in zip(torch.split(vector, sizes), parameters, strict=True)
        ]
        used = [(grad, part) for grad, part in zip(grads, parts, strict=True) if grad.requires_grad]
        return flat(
            torch.autograd.grad(
                [grad for grad, _ in used],
                parameters,
                [part for _, part in used],
                retain_graph=True,
                materialize_grads=True,
            )
        )

    return product


def check_finite(matrix: np.ndarray) -> None:
    """Raise an error if a matrix is not finite: the loss may overflow although the weights are finite."""
    if not np.isfinite(matrix).all():
        raise FeddumapError(
            "cannot find a pruning rate: the loss of the global model overflowed: lower train.lr"
        )


def lanczos(product: Product, probe: torch.Tensor, steps: int, progress: Steps = ignore) -> Spectrum:
    """`steps` Lanczos steps of a symmetric operator from `probe`, re-orthogonalised twice.

    T = Qᵀ H Q is tridiagonal; its eigenvalues are the Ritz values and the squared first components of its
    eigenvectors their weights. Stops early when the Krylov space is exhausted.

    >>> spectrum = lanczos(lambda v: torch.tensor([1.0, 2.0, 4.0]) * v, torch.ones(3), steps=9)
    >>> spectrum.values.round(5).tolist(), spectrum.weights.round(5).tolist()
    ([1.0, 2.0, 4.0], [0.33333, 0.33333, 0.33333])
    """
    steps = min(steps, len(probe))
    basis = torch.empty(steps, len(probe), dtype=probe.dtype)
    diagonal: list[float] = []
    beside: list[float] = []
    vector = probe / probe.norm()
    for step in range(steps):
        basis[step] = vector
        image = product(vector)
        progress(step + 1, steps)
        diagonal.append(float(torch.dot(image, vector)))
        known = basis[: step + 1]
        for _ in range(2):
            image = image - known.T @ (known @ image)
        length = float(image.norm())
        scale = max(map(abs, (*diagonal, *beside)))
        if step + 1 == steps or length <= 1e-6 * scale or length == 0:
            break
        beside.append(length)
        vector = image / length
    size = len(diagonal)
    matrix = np.diag(diagonal) + np.diag(beside[: size - 1], 1) + np.diag(beside[: size - 1], -1)
    check_finite(matrix)
    values, vectors = np.linalg.eigh(matrix)
    return Spectrum(values, vectors[0] ** 2)
