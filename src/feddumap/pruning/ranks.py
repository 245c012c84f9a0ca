"""Feature-map ranks: how much a filter has to say about the images it sees (HRank's measure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from feddumap.device.training import Samples, to_input
from feddumap.pruning.graph import Layer

IMAGES = 500
CHUNK = 50


@torch.no_grad()
def feature_ranks(
    network: nn.Module, layers: Sequence[Layer], samples: Samples, progress: Callable[[int, int], None]
) -> dict[str, list[float]]:
    """For each layer the mean matrix rank of each channel's map, after ReLU and before pooling, over at most
    500 images, in one pass of the unpruned network. Channels that convolutions share take their mean."""
    network.eval()
    images = samples.images[:IMAGES]
    totals: dict[str, torch.Tensor] = {}
    hooks = [
        network.get_submodule(name).register_forward_hook(_adder(totals, name))
        for layer in layers
        for name in layer.features
    ]
    for start in range(0, len(images), CHUNK):
        network(to_input(images[start : start + CHUNK]))
        progress(min(start + CHUNK, len(images)), len(images))
    for hook in hooks:
        hook.remove()
    return {
        layer.leader: (torch.stack([totals[name] for name in layer.features]).mean(0) / len(images)).tolist()
        for layer in layers
    }


def _adder(totals: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def add(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        ranks = torch.linalg.matrix_rank(F.relu(output)).double().sum(0)
        totals[name] = totals[name] + ranks if name in totals else ranks

    return add
