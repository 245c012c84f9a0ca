"""FedDF: the devices' models teach their mean, on the server's images and without their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from feddumap.algorithm import Aggregate, Merged, RoundView
from feddumap.device.evaluation import chunks, score
from feddumap.device.task import weights_of
from feddumap.device.training import Batch, Samples, adam, fit, to_input
from feddumap.models import network
from feddumap.seeds import stream
from feddumap.tensors import weighted_mean
from feddumap.types import Tensors, Upload

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
        course = Course(network(view.state.architecture, mean), lessons, teachers, exam)
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


@torch.no_grad()
def logits(weights: Tensors, samples: Samples, view: RoundView) -> torch.Tensor:
    """A teacher's outputs, in eval mode."""
    model = network(view.state.architecture, weights).eval()
    return torch.cat([model(to_input(samples.images[a:b])) for a, b in chunks(len(samples))])


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

    def __init__(self, student: nn.Module, lessons: Samples, teachers: torch.Tensor, exam: Samples) -> None:
        self.student = student
        self._lessons, self._teachers, self._exam = lessons, teachers, exam
        self.best = weights_of(student)
        self.accuracy = score(student, exam).accuracy

    def batches(self, rng: np.random.Generator, max_steps: int, patience: int) -> Iterator[Batch]:
        """Shuffled batches for as long as it is worth it; the exams happen between two of them."""
        order = np.empty(0, dtype=np.int64)
        improved = 0
        for step in range(1, max_steps + 1):
            if not len(order):
                order = rng.permutation(len(self._lessons))
            chosen, order = torch.from_numpy(order[:BATCH]), order[BATCH:]
            yield to_input(self._lessons.images[chosen]), self._teachers[chosen]
            if step % CHECK_EVERY and step < max_steps:
                continue
            accuracy = score(self.student, self._exam).accuracy
            self.student.train()
            if accuracy > self.accuracy:
                self.best, self.accuracy, improved = weights_of(self.student), accuracy, step
            if step - improved >= patience:
                return
