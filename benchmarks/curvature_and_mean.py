"""A Hessian-vector product against a gradient, and the mean of ten uploads.

    python benchmarks/curvature_and_mean.py

Prints medians in milliseconds: a product and a gradient of 100 images for the CNN, by the C kernels, and the
weighted mean of ten uploads of VGG11's size.
"""

import statistics
import time
from collections.abc import Callable

import torch

from feddumap.core.tensors import weighted_mean
from feddumap.models import architecture, initialise
from feddumap.pruning.curvature.lanczos import hessian
from feddumap.system.determinism import deterministic
from feddumap.training.backends import make_model
from feddumap.training.loop import full_gradient
from feddumap.training.samples import Samples


def milliseconds(call: Callable[[], object], times: int = 15) -> float:
    call()
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return 1000 * statistics.median(spent)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (100, 32, 32, 3), dtype=torch.uint8, generator=generator)
    samples = Samples(images, torch.randint(0, 10, (100,), generator=generator))
    cnn, vgg = architecture("cnn", 10), architecture("vgg11", 10)
    with deterministic():
        model = make_model(cnn, initialise(cnn, 0), "c")
        product = hessian(model, samples)
        vector = torch.randn(sum(part.numel() for part in model.parameters), generator=generator)
        one, other = (
            milliseconds(lambda: product(vector)),
            milliseconds(lambda: full_gradient(model, samples)),
        )
        print(f"CNN, 100 images: product {one:.1f} ms, gradient {other:.1f} ms, ratio {one / other:.2f}")
        first = initialise(vgg, 0).items()
        uploads = [
            {name: t.clone(memory_format=torch.contiguous_format) for name, t in first} for _ in range(10)
        ]
        spent = milliseconds(lambda: weighted_mean((400.0, upload) for upload in uploads))
        print(f"mean of ten uploads of VGG11's size: {spent:.0f} ms")


if __name__ == "__main__":
    main()
