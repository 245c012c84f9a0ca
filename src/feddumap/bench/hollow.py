"""Networks that weigh as much as others and do nothing: for rounds whose devices return what they got.

`feddumap.bench.hollow:lenet` is a model name like any `module:factory`, so worker processes find it too.
"""

import torch
from torch import nn

from feddumap.models import chains


class Hollow(nn.Module):
    """Carries another network's tensors as buffers, which travel and are averaged like weights.

    Its one layer multiplies by zero: it has something to differentiate, and the gradient is zero. So the one
    training step that a device makes changes nothing.
    """

    def __init__(self, like: nn.Module, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(1, classes, bias=False)
        for name, tensor in like.state_dict().items():
            self.register_buffer(name.replace(".", "_"), tensor)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        nothing = images.new_zeros(len(images), 1)
        logits: torch.Tensor = self.head(nothing)
        return logits


def lenet(classes: int) -> nn.Module:
    """LeNet5's weight: 62 thousand numbers."""
    return Hollow(chains.LENET.full(classes), classes)


def vgg11(classes: int) -> nn.Module:
    """VGG11's weight: 9.8 million numbers."""
    return Hollow(chains.VGG11.full(classes), classes)
