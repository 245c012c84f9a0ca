"""Seconds and memory that one node needs for its pruning rate, on one thread.

python benchmarks/node_rate.py [--model cnn] [--mode density] [--samples 100]
"""

import argparse
import resource
import time

import torch

from feddumap.core.messages import Question
from feddumap.models import architecture, initialise
from feddumap.pruning.rates import node_rate
from feddumap.system.determinism import deterministic
from feddumap.training.backends import make_model
from feddumap.training.samples import Samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--mode", default="density", choices=["density", "gap"])
    parser.add_argument("--kernels", default="c", choices=["c", "torch"])
    parser.add_argument("--samples", type=int, default=100)
    options = parser.parse_args()
    shape = architecture(options.model, 10)
    model = make_model(shape, initialise(shape, 0), options.kernels)
    generator = torch.Generator().manual_seed(0)
    samples = Samples(
        torch.randint(0, 256, (options.samples, 32, 32, 3), dtype=torch.uint8, generator=generator),
        torch.randint(0, 10, (options.samples,), generator=generator),
    )
    question = Question("rate", {"mode": options.mode, "max_rate": None})
    with deterministic():
        began = time.perf_counter()
        rate = node_rate(model, shape, samples, question, 777, ("device", 30, 0))
        seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{options.model} {options.mode}: {seconds:.1f} s, p = {rate.p:.3f}, peak memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
