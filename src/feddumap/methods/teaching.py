"""FedKT on a device: teachers on parts of its data, whose votes label the public images for its students."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from feddumap.config import Config
from feddumap.core.algorithm import Local, Plan
from feddumap.core.messages import Architecture, Tensors, Upload
from feddumap.device.task import Task
from feddumap.models import initialise
from feddumap.training.evaluation import chunks
from feddumap.training.loop import fit
from feddumap.training.model import Model, make
from feddumap.training.optimizers import UpdateRule, adam, sgd
from feddumap.training.samples import Samples, batches

EVERYTHING = 2**31
"""More than any server holds: all of its images are public."""

BATCH, LEARNING_RATE, WEIGHT_DECAY = 64, 1e-3, 1e-5


@dataclass(frozen=True)
class School:
    """How a teacher or a student is trained: for so many epochs from fresh weights with Adam or, where
    `epochs` is None, as a device trains in a round, from the weights it was given."""

    epochs: int | None = None

    def train(
        self,
        start: tuple[Architecture, Tensors],
        samples: Samples,
        lr: float,
        config: Config,
        rng: np.random.Generator,
        shift: torch.Tensor | None = None,
    ) -> tuple[Model, int]:
        """A network trained on `samples`, and its steps; `rng` draws the fresh weights and the order. `shift`
        is added to the outputs before cross-entropy."""
        architecture, weights = start
        if self.epochs is not None:
            weights = initialise(architecture, int(rng.integers(2**31)))
        model = make(architecture, weights, config.train.kernels, config.run.device)
        epochs, size, rule, rate = self._plan(lr, config)
        placed = samples.to(config.run.device)
        data = batches(placed, epochs, size, rng, augment=config.data.augment, shift=shift)
        return model, fit(model, data, rule, rate)

    def _plan(self, lr: float, config: Config) -> tuple[int, int, UpdateRule, float]:
        if self.epochs is None:
            return config.train.epochs, config.train.batch, sgd(), lr
        return self.epochs, BATCH, adam(weight_decay=WEIGHT_DECAY), LEARNING_RATE

    def rounds_of(self, config: Config) -> int:
        """Epochs over the samples."""
        return config.train.epochs if self.epochs is None else self.epochs


def answers(model: Model, images: torch.Tensor) -> np.ndarray:
    """The class that a network sees in each image, in eval mode."""
    device = model.parameters[0].device
    parts = [model.outputs(images[a:b].to(device)).argmax(dim=1).cpu() for a, b in chunks(len(images))]
    return np.asarray(torch.cat(parts))


def plurality(ballots: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """The class with most votes for each image, the lowest one of equals.

    >>> plurality([np.array([2, 0]), np.array([2, 1]), np.array([1, 1])], 3)
    array([2, 1])
    >>> plurality([np.array([2]), np.array([1])], 3)
    array([1])
    """
    votes = np.zeros((len(ballots[0]), classes), dtype=np.int64)
    for ballot in ballots:
        votes[np.arange(len(ballot)), ballot] += 1
    return np.asarray(votes.argmax(axis=1))


def party(partitions: int, subsets: int, school: School) -> Local:
    """A device divides its data `partitions` times into `subsets` disjoint parts. A teacher learns from each
    part, the teachers of a partition vote on the public images, and a student learns those labels. The
    students go up: the first as the weights, the others beside it."""

    def report(task: Task, samples: Samples) -> Upload:
        public = task.holdings.shared(task.device, EVERYTHING).images
        shape = task.broadcast.architecture
        start = (shape, task.broadcast.weights)
        students: list[Tensors] = []
        steps = 0
        for i in range(partitions):
            order = torch.from_numpy(task.rng(f"partition-{i}").permutation(len(samples)))
            ballots = []
            for j, part in enumerate(torch.tensor_split(order, subsets)):
                if len(part):  # a device with fewer images than subsets has fewer teachers
                    own = Samples(samples.images[part], samples.labels[part])
                    rng = task.rng(f"teacher-{i}-{j}")
                    teacher, taken = school.train(
                        start, own, task.broadcast.lr, task.config, rng, task.shift(own)
                    )
                    steps += taken
                    ballots.append(answers(teacher, public))
            lesson = Samples(public, torch.from_numpy(plurality(ballots, shape.classes)))
            rng = task.rng(f"student-{i}")
            student, taken = school.train(start, lesson, task.broadcast.lr, task.config, rng)
            steps += taken
            students.append(student.weights())
        others = {
            f"student/{i}/{name}": tensor
            for i, weights in enumerate(students[1:], start=1)
            for name, tensor in weights.items()
        }
        upload = Upload(task.device, task.broadcast.round, len(samples), steps, students[0])
        return replace(upload, extra=others)

    return lambda task, samples: Plan(lambda _: report(task, samples))


def students_of(upload: Upload, partitions: int) -> list[Tensors]:
    """The students of an upload, in order."""
    students = [upload.weights]
    for i in range(1, partitions):
        prefix = f"student/{i}/"
        students.append(
            {name.removeprefix(prefix): t for name, t in upload.extra.items() if name.startswith(prefix)}
        )
    return students


def passes(
    partitions: int, subsets: int, school: School, samples: np.ndarray, public: int, config: Config
) -> np.ndarray:
    """Samples that devices go through: teachers and students learn, and the teachers' answers take a third of
    a step each."""
    learnt = partitions * school.rounds_of(config) * (samples + public)
    return np.asarray(learnt + -(-partitions * np.minimum(subsets, samples) * public // 3))
