"""How much faster a round gets when the network has been pruned: a ratio from one run.

    python benchmarks/pruned_round.py [--model cnn] [--keep 0.7] [--repeat 5]

Trains devices of 400 random images (5 epochs, batch 10) with the full and the pruned network in turn, in this
process on one thread, and prints the medians, their ratio, and the ratio of multiply-adds beside it.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from feddumap.core.messages import CIFAR_INPUT
from feddumap.models import architecture, initialise
from feddumap.models.cost import macs
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.removal import plan
from feddumap.system.determinism import deterministic
from feddumap.training.backends import make_model
from feddumap.training.loop import fit
from feddumap.training.optimizers import sgd
from feddumap.training.samples import Samples, batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--keep", type=float, default=0.7, help="share of filters kept in each layer")
    parser.add_argument("--widths", type=int, nargs="+", help="filters kept in each layer, instead")
    parser.add_argument("--kernels", default="c", choices=["c", "torch"])
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()

    full = architecture(options.model, 10)
    weights = initialise(full, 0)
    layers = prunable(full).choose(coupled=False)
    widths = [full.widths[layer.leader] for layer in layers]
    kept = options.widths or [width - round(width * (1 - options.keep)) for width in widths]
    drop = {
        layer.leader: list(range(width - keep))
        for layer, width, keep in zip(layers, widths, kept, strict=True)
    }
    cut = plan(full, drop)
    kinds = {"full": (full, weights), "pruned": (cut.architecture, cut.apply(weights))}
    generator = torch.Generator().manual_seed(0)
    samples = Samples(
        torch.randint(0, 256, (400, 32, 32, 3), dtype=torch.uint8, generator=generator),
        torch.randint(0, 10, (400,), generator=generator),
    )
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with deterministic():
        for turn in range(options.repeat + 1):
            for name, (shape, start) in kinds.items():
                model = make_model(shape, start, options.kernels)
                began = time.perf_counter()
                fit(
                    model, batches(samples, 5, 10, np.random.default_rng(0), augment=CIFAR_INPUT), sgd(), 0.01
                )
                if turn:  # the first turn warms up
                    seconds[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    counted = {name: macs(shape) for name, (shape, _) in kinds.items()}
    for name in kinds:
        print(f"{name:7} {counted[name]:>12,} multiply-adds  {middle[name]:.2f} s a device")
    work, spent = (value["pruned"] / value["full"] for value in (counted, middle))
    print(f"ratio   {work:12.2f}                {spent:.2f}")


if __name__ == "__main__":
    main()
