"""FedDF (Lin et al., 2020): the mean of the devices' models is distilled from their ensemble.

    w_0 = mean of the w_k;  minimise KL(softmax(mean of z_k(x)) ‖ softmax(z(x))) over the server's images x

z_k are the outputs of device k's model, z those of the student. Labels of the server's images are used only
to score the student on a validation split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from feddumap.core.algorithm import Aggregate, Algorithm, Merged, RoundView
from feddumap.core.messages import Tensors, Upload
from feddumap.core.rng import stream
from feddumap.methods.fedavg import fedavg
from feddumap.methods.registry import Settings, method
from feddumap.training.backends import make_model
from feddumap.training.evaluation import chunks, score
from feddumap.training.loop import fit
from feddumap.training.model import Model
from feddumap.training.optimizers import adam
from feddumap.training.samples import Batch, Epoch, InputSource, Samples

VALIDATION = 0.1
BATCH = 128
CHECK_EVERY = 100
LEARNING_RATE, CLIP = 1e-3, 5.0

BUDGETS = {"full": (10_000, 1000), "small": (500, 200)}
"""The most distillation steps of a round, and the steps without a better score after which it stops."""


class Distillation(Settings):
    budget: Annotated[
        Literal["full", "small"],
        Field(
            description="full: up to 10000 steps a round, stop after 1000 without gain; small: 500 and 200"
        ),
    ] = "full"


# server side


def ensemble_distillation(max_steps: int, patience: int) -> Aggregate:
    """Start from the uniform mean of the received models, distil their mean logits into it, keep the best.

    Temperature 1; Adam with a cosine schedule over `max_steps`. Every 100 steps the student is scored on a
    tenth of the server's images that is kept from distillation; it stops after `patience` steps without a
    better score.
    """

    def aggregate(uploads: Iterable[Upload], view: RoundView) -> Merged:
        transfer, validation = split(view)
        total = torch.zeros(len(transfer), view.state.architecture.classes)
        factors: list[float] = []

        def models() -> Iterator[tuple[float, Tensors]]:
            """One pass over the uploads: logits are summed as the models enter the mean."""
            for upload in uploads:
                total.add_(logits(upload.weights, transfer, view), alpha=upload.factor)
                factors.append(upload.factor)
                yield upload.factor, upload.weights

        mean = view.combine(models())
        targets = total / sum(factors)
        kernels = view.context.config.train.kernels
        student = Student(make_model(view.state.architecture, mean, kernels), transfer, targets, validation)
        rng = stream(view.context.config.run.seed, "distil", view.state.round)
        data = student.batches(rng, max_steps, patience)
        steps = fit(student.model, data, adam(CLIP), lambda step: cosine(step, max_steps), kl_divergence)
        report = {"distill_steps": steps, "distill_accuracy": student.accuracy}
        return Merged(student.best, metrics=report)

    return aggregate


def split(view: RoundView) -> tuple[Samples, Samples]:
    """Nine tenths of the server's images to distil on, the rest for validation: the same in every round."""
    server = view.context.server
    order = torch.from_numpy(stream(view.context.config.run.seed, "distil-exam").permutation(len(server)))
    cut = max(1, round(VALIDATION * len(server)))
    validation, transfer = order[:cut], order[cut:]
    return (
        server[transfer],
        server[validation],
    )


def logits(weights: Tensors, samples: Samples, view: RoundView) -> torch.Tensor:
    """A received model's outputs, in eval mode."""
    model = make_model(view.state.architecture, weights, view.context.config.train.kernels)
    return torch.cat([model.outputs(samples.inputs[a:b]) for a, b in chunks(len(samples))])


def kl_divergence(student: torch.Tensor, teachers: torch.Tensor) -> torch.Tensor:
    """KL(softmax(teachers) ‖ softmax(student)), the mean over the batch."""
    targets = F.softmax(teachers, dim=1)
    return F.kl_div(F.log_softmax(student, dim=1), targets, reduction="batchmean")


def cosine(step: int, whole: int) -> float:
    """The learning rate, from 1e-3 down to 0.

    >>> cosine(0, 100), round(cosine(50, 100), 6)
    (0.001, 0.0005)
    """
    return LEARNING_RATE * (1 + math.cos(math.pi * step / whole)) / 2


class Student:
    """The model that is distilled into, its data, and its best weights on the validation split so far."""

    def __init__(self, model: Model, transfer: Samples, targets: torch.Tensor, validation: Samples) -> None:
        self.model = model
        self._transfer, self._targets, self._validation = transfer, targets, validation
        self.best = model.weights()
        self.accuracy = score(model, validation).accuracy

    def batches(self, rng: np.random.Generator, max_steps: int, patience: int) -> Iterator[Batch]:
        """Shuffled batches until the budget or the patience ends; the student is scored between batches."""
        improved = 0
        for step, batch in enumerate(islice(self._epochs(rng), max_steps), start=1):
            yield batch
            if step % CHECK_EVERY and step < max_steps:
                continue
            accuracy = score(self.model, self._validation).accuracy
            if accuracy > self.accuracy:
                self.best, self.accuracy, improved = self.model.weights(), accuracy, step
            if step - improved >= patience:
                return

    def _epochs(self, rng: np.random.Generator) -> Iterator[Batch]:
        source = InputSource(self._transfer.inputs)
        while True:
            order = rng.permutation(len(self._transfer))
            yield from Epoch(source, order, self._targets[torch.from_numpy(order)], BATCH).batches()


@method("feddf")
def feddf(settings: Distillation) -> Algorithm:
    """The devices' models together teach their mean, on the server's images (Lin et al.)."""
    steps, patience = BUDGETS[settings.budget]
    aggregate = ensemble_distillation(steps, patience)
    return replace(fedavg(), aggregate=aggregate, server_data=2, beside_mean="their mean outputs")
