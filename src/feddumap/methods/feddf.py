"""FedDF: the devices' models teach their mean, on the server's images and without their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F

from feddumap.core.algorithm import Aggregate, Merged, RoundView
from feddumap.core.messages import Tensors, Upload
from feddumap.core.rng import stream
from feddumap.core.tensors import weighted_mean
from feddumap.training.evaluation import chunks, score
from feddumap.training.loop import fit
from feddumap.training.model import Model, make
from feddumap.training.optimizers import adam
from feddumap.training.samples import Batch, Epoch, Pictures, Samples

VALIDATION = 0.1
BATCH = 128
CHECK_EVERY = 100
LEARNING_RATE, CLIP = 1e-3, 5.0


def distilled(max_steps: int, patience: int) -> Aggregate:
    """Start from the uniform mean of the received models; teach it their mean logits; keep the best.

    Loss: KL(softmax(mean of the teachers' logits) ‖ softmax(student)), temperature 1. Adam with a cosine
    schedule over `max_steps`. Every 100 steps the student is scored on a tenth of the server's images that
    is kept from the teaching; it stops after `patience` steps without a better score.
    """

    def aggregate(uploads: Iterable[Upload], view: RoundView) -> Merged:
        lessons, exam = divide(view)
        total = torch.zeros(len(lessons), view.state.architecture.classes)

        def heard() -> Iterator[tuple[float, Tensors]]:
            """Each model passes once: it teaches, and joins the mean."""
            for upload in uploads:
                total.add_(logits(upload.weights, lessons, view))
                yield 1.0, upload.weights

        mean = weighted_mean(heard())
        teachers = total / len(view.receipts)
        kernels = view.context.config.train.kernels
        course = Course(make(view.state.architecture, mean, kernels), lessons, teachers, exam)
        rng = stream(view.context.config.run.seed, "distil", view.state.round)
        data = course.batches(rng, max_steps, patience)
        steps = fit(course.student, data, adam(CLIP), lambda step: cosine(step, max_steps), divergence)
        report = {"distill_steps": steps, "distill_accuracy": course.accuracy}
        return Merged(course.best, metrics=report)

    return aggregate


def divide(view: RoundView) -> tuple[Samples, Samples]:
    """Nine tenths of the server's images to teach on, the rest to examine with: the same in every round."""
    server = view.context.server
    order = torch.from_numpy(stream(view.context.config.run.seed, "distil-exam").permutation(len(server)))
    cut = max(1, round(VALIDATION * len(server)))
    exam, lessons = order[:cut], order[cut:]
    return (
        Samples(server.images[lessons], server.labels[lessons]),
        Samples(server.images[exam], server.labels[exam]),
    )


def logits(weights: Tensors, samples: Samples, view: RoundView) -> torch.Tensor:
    """A teacher's outputs, in eval mode."""
    model = make(view.state.architecture, weights, view.context.config.train.kernels)
    return torch.cat([model.outputs(samples.images[a:b]) for a, b in chunks(len(samples))])


def divergence(student: torch.Tensor, teachers: torch.Tensor) -> torch.Tensor:
    """KL(softmax(teachers) ‖ softmax(student)), the mean over the batch."""
    targets = F.softmax(teachers, dim=1)
    return F.kl_div(F.log_softmax(student, dim=1), targets, reduction="batchmean")


def cosine(step: int, whole: int) -> float:
    """The learning rate, from 1e-3 down to 0.

    >>> cosine(0, 100), round(cosine(50, 100), 6)
    (0.001, 0.0005)
    """
    return LEARNING_RATE * (1 + math.cos(math.pi * step / whole)) / 2


class Course:
    """The student, its lessons, and the best it has been so far."""

    def __init__(self, student: Model, lessons: Samples, teachers: torch.Tensor, exam: Samples) -> None:
        self.student = student
        self._lessons, self._teachers, self._exam = lessons, teachers, exam
        self.best = student.weights()
        self.accuracy = score(student, exam).accuracy

    def batches(self, rng: np.random.Generator, max_steps: int, patience: int) -> Iterator[Batch]:
        """Shuffled batches for as long as it is worth it; the exams happen between two of them."""
        improved = 0
        for step, batch in enumerate(islice(self._epochs(rng), max_steps), start=1):
            yield batch
            if step % CHECK_EVERY and step < max_steps:
                continue
            accuracy = score(self.student, self._exam).accuracy
            if accuracy > self.accuracy:
                self.best, self.accuracy, improved = self.student.weights(), accuracy, step
            if step - improved >= patience:
                return

    def _epochs(self, rng: np.random.Generator) -> Iterator[Batch]:
        pictures = Pictures(self._lessons.images)
        while True:
            order = rng.permutation(len(self._lessons))
            yield from Epoch(pictures, order, self._teachers[torch.from_numpy(order)], BATCH).batches()
