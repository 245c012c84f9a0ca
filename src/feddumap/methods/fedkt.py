"""FedKT (Li et al., 2021): knowledge transfer by votes on the server's images, which are public.

    device:  for each of `partitions` partitions of its data into `subsets` parts: a teacher is trained on
             each part, the plurality vote of the teachers labels the public images, and a student is trained
             on these labels
    server:  a device votes for a label of an image if all its students agree on it (consistent voting); the
             final model is trained on the labels with most votes

FedKT has one round and trains every model from fresh weights; `fedkt-iter` does this in every round, with
models that continue from the global one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from feddumap.config import Config
from feddumap.core.algorithm import Aggregate, Algorithm, Local, Merged, RoundView
from feddumap.core.messages import Architecture, Tensors, Upload
from feddumap.core.rng import stream
from feddumap.device.task import Task
from feddumap.methods.registry import Settings, method
from feddumap.methods.settings import Transfer
from feddumap.models import initialise
from feddumap.training.backends import make_model
from feddumap.training.evaluation import chunks
from feddumap.training.loop import fit
from feddumap.training.model import Model
from feddumap.training.optimizers import UpdateRule, adam, sgd
from feddumap.training.samples import Samples, batches

ALL_IMAGES = 2**31
"""More than any server holds: all of its images are public."""

BATCH, LEARNING_RATE, WEIGHT_DECAY = 64, 1e-3, 1e-5
"""Of a training from fresh weights."""


class Voting(Transfer):
    partitions: Annotated[
        int, Field(ge=1, description="times a device divides its data; one student each")
    ] = 2
    subsets: Annotated[int, Field(ge=1, description="parts of each division; a teacher each")] = 5


class OneShot(Settings):
    vote_epochs: Annotated[
        int, Field(ge=1, description="epochs of each teacher, student and final model")
    ] = 100


# training and votes, on both sides


@dataclass(frozen=True)
class Training:
    """How teachers, students and the final model are trained: `epochs` epochs of Adam from fresh weights or,
    where `epochs` is None, as a device of FedAvg trains in a round, from the weights given."""

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
        """A network trained on `samples`, and its steps. `rng` draws the fresh weights and the order of the
        samples; `shift` is added to the outputs before cross-entropy."""
        architecture, weights = start
        if self.epochs is not None:
            weights = initialise(architecture, int(rng.integers(2**31)))
        model = make_model(architecture, weights, config.train.kernels, config.run.device)
        size, rule, rate = self._hyperparameters(lr, config)
        placed = samples.to(config.run.device)
        epochs = self.epochs_of(config)
        augment = architecture.input if config.data.augment else None
        data = batches(placed, epochs, size, rng, augment=augment, shift=shift)
        return model, fit(model, data, rule, rate)

    def _hyperparameters(self, lr: float, config: Config) -> tuple[int, UpdateRule, float]:
        if self.epochs is None:
            return config.train.batch, sgd(), lr
        return BATCH, adam(weight_decay=WEIGHT_DECAY), LEARNING_RATE

    def epochs_of(self, config: Config) -> int:
        """Epochs over the samples."""
        return config.train.epochs if self.epochs is None else self.epochs


def predictions(model: Model, images: torch.Tensor) -> np.ndarray:
    """The class that a network predicts for each image, in eval mode."""
    device = model.parameters[0].device
    parts = [model.outputs(images[a:b].to(device)).argmax(dim=1).cpu() for a, b in chunks(len(images))]
    return np.asarray(torch.cat(parts))


def plurality(predicted: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """The class predicted most often for each image, the lowest one of equals.

    >>> plurality([np.array([2, 0]), np.array([2, 1]), np.array([1, 1])], 3)
    array([2, 1])
    >>> plurality([np.array([2]), np.array([1])], 3)
    array([1])
    """
    votes = np.zeros((len(predicted[0]), classes), dtype=np.int64)
    for labels in predicted:
        votes[np.arange(len(labels)), labels] += 1
    return np.asarray(votes.argmax(axis=1))


# device side


def train_students(partitions: int, subsets: int, training: Training) -> Local:
    """Trains teachers, and students on the teachers' votes. The students are uploaded: the first as the
    weights, the others as `student/i/…`."""

    def local(task: Task, samples: Samples) -> Upload:
        public = task.holdings.shared(task.device, ALL_IMAGES).inputs
        shape, lr = task.broadcast.architecture, task.broadcast.lr
        start = (shape, task.broadcast.weights)
        students: list[Tensors] = []
        total = 0
        for i in range(partitions):
            order = torch.from_numpy(task.rng(f"partition-{i}").permutation(len(samples)))
            predicted = []
            for j, part in enumerate(torch.tensor_split(order, subsets)):
                if len(part):  # a device with fewer images than subsets has fewer teachers
                    own = samples[part]
                    rng = task.rng(f"teacher-{i}-{j}")
                    teacher, steps = training.train(start, own, lr, task.config, rng, task.shift(own))
                    total += steps
                    predicted.append(predictions(teacher, public))
            voted = Samples(public, torch.from_numpy(plurality(predicted, shape.classes)))
            student, steps = training.train(start, voted, lr, task.config, task.rng(f"student-{i}"))
            total += steps
            students.append(student.weights())
        others = {
            f"student/{i}/{name}": tensor
            for i, weights in enumerate(students[1:], start=1)
            for name, tensor in weights.items()
        }
        return Upload(task.device, task.broadcast.round, len(samples), total, students[0], extra=others)

    return local


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
    partitions: int, subsets: int, training: Training, samples: np.ndarray, public: int, config: Config
) -> np.ndarray:
    """Samples that each device processes, for the clock: those that teachers and students train on, and a
    third for each prediction of a teacher, which has no backward pass."""
    trained = partitions * training.epochs_of(config) * (samples + public)
    return np.asarray(trained + -(-partitions * np.minimum(subsets, samples) * public // 3))


# server side


def consistent_voting(partitions: int, training: Training) -> Aggregate:
    """The final model is trained on the labels with most votes: from fresh weights or from the students'
    mean, by `training`."""

    def aggregate(uploads: Iterable[Upload], view: RoundView) -> Merged:
        server, shape = view.context.server, view.state.architecture
        config = view.context.config
        votes = np.zeros((len(server), shape.classes), dtype=np.int64)

        def models() -> Iterator[tuple[float, Tensors]]:
            """One pass over the uploads: each device votes as its students enter the mean."""
            for upload in uploads:
                students = students_of(upload, partitions)
                networks = (make_model(shape, student, config.train.kernels) for student in students)
                add_votes(votes, [predictions(network, server.inputs) for network in networks])
                for student in students:
                    yield upload.weight, student

        mean = view.combine(models())
        labels = votes.argmax(axis=1)
        rng = stream(config.run.seed, "elected", view.state.round)
        voted = Samples(server.inputs, torch.from_numpy(labels))
        view.context.progress("final model", 0, 1)
        model, _ = training.train((shape, mean), voted, view.lr, config, rng)
        report = {
            "vote_accuracy": float((labels == server.targets.numpy()).mean()),
            "unelected": int((votes.sum(axis=1) == 0).sum()),
        }
        return Merged(model.weights(), metrics=report)

    return aggregate


def add_votes(votes: np.ndarray, predicted: Sequence[np.ndarray]) -> None:
    """Add a device's votes: one for each image on which all its students agree.

    >>> votes = np.zeros((2, 3), dtype=np.int64)
    >>> add_votes(votes, [np.array([1, 2]), np.array([1, 0])])
    >>> votes.tolist()
    [[0, 1, 0], [0, 0, 0]]
    """
    agreed = np.all(np.stack(predicted) == predicted[0], axis=0).nonzero()[0]
    votes[agreed, predicted[0][agreed]] += 1


def knowledge_transfer(keys: Voting, training: Training) -> Algorithm:
    """The slots of FedKT."""
    return Algorithm(
        local=train_students(keys.partitions, keys.subsets, training),
        aggregate=consistent_voting(keys.partitions, training),
        shared=ALL_IMAGES,
        shared_on_clock=keys.transfer_on_clock,
        server_data=1,
        passes=partial(passes, keys.partitions, keys.subsets, training),
        reply=lambda message: keys.partitions * message.reply_nbytes,
        updates=False,
        beside_mean="their votes",
    )


@method("fedkt")
def fedkt(voting: Voting, settings: OneShot) -> Algorithm:
    """In a single round, devices' teachers and then their students vote on labels to learn (Li et al.)."""
    return replace(knowledge_transfer(voting, Training(settings.vote_epochs)), one_shot=True)


@method("fedkt-iter")
def fedkt_iter(voting: Voting) -> Algorithm:
    """FedKT's votes in every round, on models that go on from the global one."""
    return knowledge_transfer(voting, Training())
