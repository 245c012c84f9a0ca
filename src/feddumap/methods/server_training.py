"""Training of a model on the server's own images, as FedDU and Hybrid-FL do it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from feddumap.core.algorithm import RoundView
from feddumap.core.messages import Tensors
from feddumap.core.rng import stream
from feddumap.system.callbacks import Progress
from feddumap.training.backends import make_model
from feddumap.training.loop import fit
from feddumap.training.optimizers import UpdateRule, masked, sgd
from feddumap.training.samples import Batch, Samples, batches, label_shift


def server_steps(samples: int, epochs: int, batch: int) -> int:
    """τ = E·⌈n0/B⌉.

    >>> server_steps(100, epochs=5, batch=32)
    20
    """
    return epochs * math.ceil(samples / batch)


def train_copy(
    weights: Tensors, samples: Samples, view: RoundView, rule: UpdateRule | None = None
) -> Tensors:
    """`weights` after E epochs on `samples` at the round's learning rate, by plain SGD unless `rule` is
    given, inside the mask."""
    config = view.context.config
    model = make_model(view.state.architecture, weights, config.train.kernels, config.run.device)
    rng = stream(config.run.seed, "server-batches", view.state.round)
    placed = samples.to(config.run.device)
    train = config.train
    shift = label_shift(placed.targets, view.state.architecture.classes, train.calibration)
    augment = view.state.architecture.input if config.data.augment else None
    data = batches(placed, train.epochs, train.batch, rng, augment=augment, shift=shift)
    total = server_steps(len(samples), train.epochs, train.batch)
    reported = report_progress(data, total, view.context.progress)
    fit(model, reported, masked(rule or sgd(), view.state.mask), view.lr)
    return model.weights()


def report_progress(data: Iterable[Batch], total: int, progress: Progress) -> Iterator[Batch]:
    """The batches unchanged; every 50 steps `progress` is called."""
    for step, batch in enumerate(data):
        if step % 50 == 0:
            progress("server steps", step, total)
        yield batch
