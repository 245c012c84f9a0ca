"""ResNet18 for small images: a 3×3 stem of stride 1, no max-pool, convolutions with bias and batch norm."""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from feddumap.core.messages import InputSpec
from feddumap.errors import FeddumapError

_STAGES = {"stage1": 64, "stage2": 128, "stage3": 256, "stage4": 512}
_BLOCKS = 2


class Block(nn.Module):
    """Two 3×3 convolutions added to the block's input, which is projected where the shape of the full network
    changes. `inner` is the first convolution's width, which only the block itself depends on."""

    def __init__(self, inputs: int, inner: int, outputs: int, *, project: bool) -> None:
        super().__init__()
        stride = 2 if project else 1
        self.conv1 = nn.Conv2d(inputs, inner, 3, stride, 1)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, outputs, 3, 1, 1)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.projection = nn.Conv2d(inputs, outputs, 1, stride) if project else None
        self.projection_norm = nn.BatchNorm2d(outputs) if project else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.projection is not None and self.projection_norm is not None:
            x = self.projection_norm(self.projection(x))
        return F.relu(x + y)


class ResNet18(nn.Module):
    """Stem, four stages of two blocks, global average pooling, one linear layer."""

    def __init__(self, widths: Mapping[str, int], classes: int, given: InputSpec) -> None:
        super().__init__()
        inputs = widths["stem"]
        self.stem = nn.Conv2d(given.shape[0], inputs, 3, 1, 1)
        self.stem_norm = nn.BatchNorm2d(inputs)
        for stage in _STAGES:
            outputs = widths[f"{stage}.0.conv2"]
            blocks = []
            for block in range(_BLOCKS):
                inner = widths[f"{stage}.{block}.conv1"]
                blocks.append(Block(inputs, inner, outputs, project=_projects(stage, block)))
                inputs = outputs
            self.add_module(stage, nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        for stage in _STAGES:
            x = self.get_submodule(stage)(x)
        logits: torch.Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def full(classes: int, given: InputSpec) -> nn.Module:
    """The unpruned network."""
    widths = {name: width for stage, width in _STAGES.items() for name in _convolutions(stage)}
    return ResNet18(widths, classes, given)


def resized(widths: Mapping[str, int], classes: int, given: InputSpec) -> nn.Module:
    """The network with these widths, which must be equal for layers that a residual sum adds."""
    for stage in _STAGES:
        summed = {name: widths[name] for name in _convolutions(stage) if not name.endswith("conv1")}
        if len(set(summed.values())) > 1:
            raise FeddumapError(
                f"the residual sums of resnet18's {stage} need equal numbers of channels, not "
                + ", ".join(f"{name}={width}" for name, width in summed.items())
            )
    return ResNet18(widths, classes, given)


def _convolutions(stage: str) -> Iterator[str]:
    """The names of a stage's convolutions; the stem belongs to the first stage, whose sums it is part of."""
    if stage == "stage1":
        yield "stem"
    for block in range(_BLOCKS):
        yield f"{stage}.{block}.conv1"
        yield f"{stage}.{block}.conv2"
        if _projects(stage, block):
            yield f"{stage}.{block}.projection"


def _projects(stage: str, block: int) -> bool:
    # determined by the full network: a pruned stage keeps its projection even if widths match
    return stage != "stage1" and block == 0
