"""What FedKT's teachers vote for in the first round of `fedkt-iter`: LeNet5 on CIFAR-10, the paper's setting.

    python results/fedkt_teachers.py [EPOCHS ...]

A teacher is trained from the initial weights on a fifth of a device's images, as in a round. For each number
of epochs: how many teachers give all of the server's images one label.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from feddumap.config import load
from feddumap.methods.fedkt import Training, predictions
from feddumap.run import start
from feddumap.training.samples import Samples

DEVICES, SUBSETS = 10, 5


def main() -> None:
    keys = ["data.name=cifar10", "data.validation=500", "model.name=lenet", "method.name=fedkt-iter"]
    run = start(load(None, [*keys, "run.workers=1"]))
    data, architecture, weights = run.dataset, run.state.architecture, run.state.weights
    public = Samples.take(data.train_inputs, data.train_labels, run.split.server).inputs
    parts = [
        Samples.take(data.train_inputs, data.train_labels, run.split.device(k))
        for k in range(run.config.data.devices)
    ]
    chosen = [part for part in parts if len(part.targets.unique()) == 2][:DEVICES]
    for epochs in map(int, sys.argv[1:] or ["5", "50"]):
        config = load(None, [*keys, f"train.epochs={epochs}"])
        constant = 0
        for k, own in enumerate(chosen):
            rng = np.random.default_rng(k)
            for part in torch.tensor_split(torch.from_numpy(rng.permutation(len(own))), SUBSETS):
                teacher, _ = Training().train(
                    (architecture, weights), own[part], config.train.lr, config, rng
                )
                constant += len(np.unique(predictions(teacher, public))) == 1
        print(f"{epochs} epochs: {constant} of {len(chosen) * SUBSETS} teachers give one label to all images")


if __name__ == "__main__":
    main()
