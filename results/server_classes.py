"""The test accuracy of runs on the classes of which the server has images, and on the others.

    python results/server_classes.py RUN [RUN ...]

Shows whether a method prefers the server's classes. The newest checkpoint of each run is scored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from checkpoints import newest


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        run = newest(folder)
        data, last = run.data, run.state.round
        own = np.isin(data.test_labels, np.unique(data.train_labels[run.split.server]))
        if own.all():
            print(f"the server has images of all classes: {folder.name}")
            continue
        on_own, on_others = (
            100 * run.score(data.test_inputs, data.test_labels, np.flatnonzero(which))
            for which in (own, ~own)
        )
        shown = f"{on_own:.1f} % on the server's classes, {on_others:.1f} % on the others"
        print(f"{shown}: {folder.name}, round {last}")


if __name__ == "__main__":
    main()
