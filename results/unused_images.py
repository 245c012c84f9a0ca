"""The accuracy of runs on training images that neither a device nor the server trains on, of all classes.

    python results/unused_images.py RUN [RUN ...]

To choose between variants without the test images. The server's 500 held-out images have five of the ten
classes only; the last 10,000 training images, from which the server's 4,000 are drawn, have all. The accuracy
of the newest checkpoint is averaged over classes, since few images of the server's classes are left.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import numpy as np

from feddumap.config import Config
from feddumap.data.dataset import Dataset
from feddumap.data.partition import split
from feddumap.data.sources import catalog
from feddumap.runs.reader import read_checkpoint, read_config
from feddumap.training.evaluation import score_weights
from feddumap.training.samples import Samples


def unused(data: Dataset, config: Config) -> np.ndarray:
    """Indices of the training images that nobody trains on."""
    made = split(data.train_labels, len(data.classes), config.data, config.run.seed)
    return np.setdiff1d(np.arange(len(data.train_labels)), np.concatenate([made.indices, made.server]))


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        config = read_config(folder)
        state = read_checkpoint(max(folder.glob("checkpoint-*.json"))).state
        data = catalog.get(config.data)
        indices = unused(data, config)
        labels = data.train_labels[indices]
        accuracies = [
            score_weights(
                state.architecture,
                state.weights,
                Samples.take(data.train_inputs, data.train_labels, indices[labels == label]),
                config,
            ).accuracy
            for label in range(len(data.classes))
        ]
        print(f"{100 * fmean(accuracies):.2f} %  {folder.name}, round {state.round}, {len(indices)} images")


if __name__ == "__main__":
    main()
