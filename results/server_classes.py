"""The test accuracy of runs on the classes of which the server has images, and on the others.

    python results/server_classes.py RUN [RUN ...]

Shows whether a method prefers the server's classes. The newest checkpoint of each run is scored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from feddumap.data.partition import split
from feddumap.data.sources import catalog
from feddumap.runs.reader import read_checkpoint, read_config
from feddumap.training.evaluation import score_weights
from feddumap.training.samples import Samples


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        config = read_config(folder)
        state = read_checkpoint(max(folder.glob("checkpoint-*.json"))).state
        data = catalog.get(config.data)
        server = split(data.train_labels, len(data.classes), config.data, config.run.seed).server
        own = np.isin(data.test_labels, np.unique(data.train_labels[server]))
        if own.all():
            print(f"the server has images of all classes: {folder.name}")
            continue
        accuracies = [
            score_weights(
                state.architecture,
                state.weights,
                Samples.take(data.test_inputs, data.test_labels, np.flatnonzero(which)),
                config,
            ).accuracy
            for which in (own, ~own)
        ]
        shown = " on the server's classes, ".join(f"{100 * accuracy:.1f} %" for accuracy in accuracies)
        print(f"{shown} on the others: {folder.name}, round {state.round}")


if __name__ == "__main__":
    main()
