"""FedKT on the server: the parties' students vote on the public images, and the model learns the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from feddumap.core.algorithm import Aggregate, Merged, RoundView
from feddumap.core.messages import Tensors, Upload
from feddumap.core.rng import stream
from feddumap.core.tensors import weighted_mean
from feddumap.methods.teaching import School, answers, students_of
from feddumap.training.model import make
from feddumap.training.samples import Samples


def elected(partitions: int, school: School) -> Aggregate:
    """Each party has one vote an image, and only where its students agree (consistent voting). The model that
    learns the elected labels begins afresh, or as the students' mean, as the school has it."""

    def aggregate(uploads: Iterable[Upload], view: RoundView) -> Merged:
        server, shape = view.context.server, view.state.architecture
        votes = np.zeros((len(server), shape.classes), dtype=np.int64)
        kernels = view.context.config.train.kernels

        def heard() -> Iterator[tuple[float, Tensors]]:
            """Each party passes once: it votes, and its students join the mean."""
            for upload in uploads:
                students = students_of(upload, partitions)
                count(votes, [answers(make(shape, student, kernels), server.images) for student in students])
                for student in students:
                    yield upload.samples, student

        mean = weighted_mean(heard())
        labels = votes.argmax(axis=1)
        config = view.context.config
        rng = stream(config.run.seed, "elected", view.state.round)
        lesson = Samples(server.images, torch.from_numpy(labels))
        view.context.progress("final model", 0, 1)
        model, _ = school.train((shape, mean), lesson, view.lr, config, rng)
        report = {
            "vote_accuracy": float((labels == server.labels.numpy()).mean()),
            "unelected": int((votes.sum(axis=1) == 0).sum()),
        }
        return Merged(model.weights(), metrics=report)

    return aggregate


def count(votes: np.ndarray, ballots: list[np.ndarray]) -> None:
    """Add a party's votes: one for each image on which all its students agree.

    >>> votes = np.zeros((2, 3), dtype=np.int64)
    >>> count(votes, [np.array([1, 2]), np.array([1, 0])])
    >>> votes.tolist()
    [[0, 1, 0], [0, 0, 0]]
    """
    agreed = np.all(np.stack(ballots) == ballots[0], axis=0).nonzero()[0]
    votes[agreed, ballots[0][agreed]] += 1
