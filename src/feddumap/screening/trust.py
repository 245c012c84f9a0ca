"""Trust: the server's own data check what a device says it has learned.

    a_k = L(w_k; P_k) − L(w; P_k),   L(w; P) = Σ P(c) ℓ_c(w) / Σ P(c) over the server's classes c

ℓ_c(w) is the loss of a model on the server's images of class c, and P_k the label frequencies that device k
told before the first round. Whoever trains on its labels lowers its loss on them: an upload is left out if
a_k is more than `aggregate.margin`. Updates are clipped first (`clipped.py`), which is all that can be done
about a device none of whose classes the server has.

FLTrust (Cao et al., 2021) compares directions of updates instead: cos(w_k − w, w_0 − w), where w_0 is a model
trained on the server's data. That asks of server and devices to hold the same classes; docs/robustness.md
compares the two.

The server sees one upload at a time, and keeps the best one of those left out in case that no other counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from feddumap.core.algorithm import RoundView
from feddumap.core.messages import Tensors, Upload
from feddumap.core.rng import stream
from feddumap.screening.clipped import Clipped
from feddumap.training.backends import make_model
from feddumap.training.evaluation import chunks
from feddumap.training.samples import Samples

IMAGES = 50
"""The server's images of a class that uploads are checked with, at most."""


def examined(server: Samples, seed: int) -> Samples:
    """At most 50 images of each class, the same in every round."""
    labels = server.targets.numpy()
    order = stream(seed, "trust").permutation(len(server))
    chosen = [order[labels[order] == label][:IMAGES] for label in np.unique(labels)]
    return server[np.sort(np.concatenate(chosen))]


def class_losses(weights: Tensors, samples: Samples, view: RoundView) -> np.ndarray:
    """The mean cross-entropy on the samples of each class; not a number for a class without any."""
    config, shape = view.context.config, view.state.architecture
    model = make_model(shape, weights, config.train.kernels, config.run.device)
    placed = samples.to(config.run.device)
    outputs = torch.cat([model.outputs(placed.inputs[a:b]) for a, b in chunks(len(samples))])
    with torch.inference_mode():
        losses = F.cross_entropy(outputs.double(), placed.targets, reduction="none").cpu().numpy()
    labels = samples.targets.numpy()
    sums = np.bincount(labels, losses, shape.classes)
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / np.bincount(labels, minlength=shape.classes))


def rise(before: np.ndarray, after: np.ndarray, counts: np.ndarray) -> float | None:
    """a_k from the losses by class, infinite if one of them is not a number; None if the device has no class
    that the server has.

    >>> missing = np.array([1.0, 2.0, np.nan])
    >>> rise(missing, np.array([1.0, 4.0, np.nan]), np.array([3.0, 1.0, 9.0]))
    0.5
    >>> rise(missing, np.array([1.0, np.nan, np.nan]), np.array([3.0, 1.0, 9.0]))
    inf
    >>> rise(missing, missing, np.array([0.0, 0.0, 5.0])) is None
    True
    """
    shares = np.where(np.isnan(before), 0.0, counts)
    if not shares.sum() > 0:
        return None
    changes = np.where(shares > 0, after - before, 0.0)
    return math.inf if np.isnan(changes).any() else float((shares * changes).sum() / shares.sum())


class Trust(Clipped):
    """Clips updates, and leaves out those after which a device's own classes are worse predicted."""

    def admit(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
        labels = self.view.context.census.labels
        assert labels is not None  # a run with this rule asks for them
        samples = examined(self.view.context.server, self.view.context.config.run.seed)
        before = class_losses(self.view.state.weights, samples, self.view)
        best: tuple[float, Upload] | None = None
        counted = 0
        for upload in super().admit(uploads):
            after = class_losses(upload.weights, samples, self.view)
            change = rise(before, after, labels[upload.device])
            if change is None or change <= self.settings.margin:
                counted += 1
                yield upload
                continue
            self.left_out[str(upload.device)] = (
                f"the loss on the server's images of its classes rose by {change:.3g}, more than "
                f"{self.settings.margin:g}"
            )
            if best is None or change < best[0]:
                best = change, upload
        if not counted and best is not None:  # a model must be made of something
            del self.left_out[str(best[1].device)]
            yield best[1]
