"""How much of a run's error is due to its output layer.

    python results/output_layer.py RUN [RUN ...]

The output layer of the newest checkpoint is fitted anew, on the images of all devices together, as no
federated method could; all other layers stay. What that gains on the test images is about the most that
correcting the output layer could bring. The rest is due to the features.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from checkpoints import newest
from sklearn.linear_model import LogisticRegression
from torch import nn

from feddumap.models import build
from feddumap.models.state import load_state
from feddumap.training.samples import to_input

CHUNK = 500
STEPS = 300  # of L-BFGS


def features(network: nn.Module, inputs: np.ndarray) -> np.ndarray:
    """What the last linear layer receives for these images."""
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    seen: list[torch.Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.inference_mode():
        for start in range(0, len(inputs), CHUNK):
            network(to_input(torch.from_numpy(np.array(inputs[start : start + CHUNK]))))
    hook.remove()
    return torch.cat(seen).numpy()


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        run = newest(folder)
        data, devices = run.data, np.sort(run.split.indices)
        network = build(run.state.architecture).eval()
        load_state(network, run.state.weights, {})
        own, test = features(network, data.train_inputs[devices]), features(network, data.test_inputs)
        mean, scale = own.mean(axis=0), own.std(axis=0) + 1e-6
        fitted = LogisticRegression(C=np.inf, max_iter=STEPS).fit(
            (own - mean) / scale, data.train_labels[devices]
        )
        anew = 100 * fitted.score((test - mean) / scale, data.test_labels)
        before = 100 * run.score(data.test_inputs, data.test_labels, np.arange(len(data.test_labels)))
        print(
            f"{before:.1f} %, output layer fitted anew {anew:.1f} %: {folder.name}, round {run.state.round}"
        )


if __name__ == "__main__":
    main()
