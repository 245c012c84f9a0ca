"""How well scores that the server's data give tell hostile uploads from honest ones.

python benchmarks/trust_scores.py data.partition=shards attack.name=sign-flip attack.scale=2

Trains FedAvg on the digits without the hostile uploads and prints, for each score, the probability that a
hostile upload scores worse than an honest one (AUC): FLTrust's cosine, the change of the loss on all of the
server's images, and the change on those of the device's classes (`aggregate.name = "trust"`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from feddumap import run as api
from feddumap.attacks import hostile_devices
from feddumap.config import load
from feddumap.core.algorithm import RoundView
from feddumap.core.messages import Tensors, Upload
from feddumap.core.screening import Screening
from feddumap.methods.server_training import train_copy
from feddumap.screening.rule import Rule
from feddumap.screening.trust import class_losses, examined, rise
from feddumap.screening.vectors import update

SETTING = (
    "data.devices=20", "data.augment=false", "model.name=lenet", "train.rounds=30", "train.cohort=10",
    "train.lr=0.05", "run.workers=1",
)  # fmt: skip
SCORES = ("cosine", "loss on all images", "loss on its classes")
MARGIN = 0.25


def main() -> None:
    run = api.start(load(None, [*SETTING, *sys.argv[1:]]))
    run._algorithm = replace(run._algorithm, labels="counts")
    hostile = hostile_devices(run.config)
    rows: list[tuple[int, bool, float, float, float]] = []

    class Scoring(Rule):
        """Scores every upload, and lets the honest ones pass."""

        def admit(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
            view, start = self.view, self.view.state.weights
            labels: Any = view.context.census.labels
            samples = examined(view.context.server, run.config.run.seed)
            whole = np.bincount(samples.targets.numpy(), minlength=labels.shape[1])
            before = class_losses(start, samples, view)
            server = direction(train_copy(start, view.context.server, view), view)
            for upload in uploads:
                own = direction(upload.weights, view)
                after = class_losses(upload.weights, samples, view)
                of_classes = rise(before, after, labels[upload.device])
                rows.append(
                    (
                        view.state.round,
                        upload.device in hostile,
                        -float(own @ server),
                        rise(before, after, whole) or 0.0,
                        np.nan if of_classes is None else of_classes,
                    )
                )
                if upload.device not in hostile:
                    yield upload

    run._algorithm = replace(run._algorithm, screening=Screening(begin=Scoring))
    run.run()
    table = np.array(rows, dtype=np.float64)
    bad, third = table[:, 1] == 1, run.rounds // 3
    for place, name in enumerate(SCORES, start=2):
        told = []
        for now in (table[:, 0] < third, table[:, 0] >= third):
            known = now & ~np.isnan(table[:, place])
            worse = table[known & bad, place][:, None] > table[known & ~bad, place][None]
            told.append(f"{worse.mean():.2f}")
        print(f"{name}: AUC {told[0]} in the first {third} rounds, {told[1]} afterwards")
    judged = ~np.isnan(table[:, 4])
    left = [(table[judged & kind, 4] > MARGIN).mean() for kind in (bad, ~bad)]
    print(f"a_k > {MARGIN}: {left[0]:.0%} of the hostile, {left[1]:.0%} of the honest uploads; "
          f"{judged.mean():.0%} can be judged")  # fmt: skip


def direction(weights: Tensors, view: RoundView) -> torch.Tensor:
    """The update as a unit vector."""
    start = view.state.weights
    names = [name for name in start if start[name].is_floating_point()]
    vector = torch.cat([update(weights[name], start[name]) for name in names])
    return vector / vector.norm()


if __name__ == "__main__":
    main()
