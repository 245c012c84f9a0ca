"""Which outputs of a convolution have a gradient: the figure of docs/performance.md.

    python benchmarks/sparsity.py RUN [--out docs/images/sparsity.svg]

RUN is the directory of a CNN or LeNet5 run on CIFAR-10. Prints the share of each convolution's outputs whose
gradient is not zero, over 200 test images, and draws it for one image.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import feddumap
from feddumap.training.samples import to_input

IMAGES = 200
INK, LIVE, DEAD = "#3b4252", "#c2410c", "#f1f1ee"


def gradients(network: nn.Sequential, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """∂ loss / ∂ output of each convolution."""
    outputs: dict[str, torch.Tensor] = {}
    x = images
    for name, layer in network.named_children():
        x = layer(x)
        if isinstance(layer, nn.Conv2d):
            outputs[name] = x
    loss = F.cross_entropy(x, labels)
    return dict(zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True))


def draw(found: dict[str, torch.Tensor], shares: dict[str, float], image: torch.Tensor, out: Path) -> None:
    first = next(iter(found))
    maps = (found[first][0] != 0).float()
    channel = int((maps.mean((1, 2)) - shares[first]).abs().argmin())  # a typical one
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.1), width_ratios=[1, 1, 1.1])
    axes[0].imshow(image)
    axes[0].set_title("image", color=INK)
    axes[1].imshow(maps[channel], cmap=plt.matplotlib.colors.ListedColormap([DEAD, LIVE]))
    axes[1].set_title(f"{first}: outputs with a gradient", color=INK)
    for axis in axes[:2]:
        axis.set_axis_off()
    names = list(shares)
    axes[2].barh(names, [1] * len(names), color=DEAD)
    axes[2].barh(names, list(shares.values()), color=LIVE)
    for i, share in enumerate(shares.values()):
        axes[2].text(share + 0.02, i, f"{share:.1%}", va="center", color=INK)
    axes[2].invert_yaxis()
    axes[2].set_xticks([])
    axes[2].tick_params(length=0, colors=INK)
    axes[2].spines[:].set_visible(False)
    axes[2].set_title("share of all outputs", color=INK)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    run = feddumap.resume(options.run)
    network, data = run.model(), run.dataset
    run.close()
    images = torch.from_numpy(data.test_inputs[:IMAGES].copy())
    labels = torch.from_numpy(data.test_labels[:IMAGES].astype("int64"))
    found = gradients(network, to_input(images), labels)
    shares = {name: float((grad != 0).double().mean()) for name, grad in found.items()}
    for name, share in shares.items():
        print(f"{name}: {share:.1%} of the outputs have a gradient")
    if options.out is not None:
        draw(found, shares, images[0].numpy(), options.out)


if __name__ == "__main__":
    main()
