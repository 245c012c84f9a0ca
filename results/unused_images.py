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
from checkpoints import newest


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        run = newest(folder)
        data, last = run.data, run.state.round
        used = np.concatenate([run.split.indices, run.split.server])
        indices = np.setdiff1d(np.arange(len(data.train_labels)), used)
        labels = data.train_labels[indices]
        accuracies = [
            run.score(data.train_inputs, data.train_labels, indices[labels == label])
            for label in range(len(data.classes))
        ]
        print(f"{100 * fmean(accuracies):.2f} %  {folder.name}, round {last}, {len(indices)} images")


if __name__ == "__main__":
    main()
