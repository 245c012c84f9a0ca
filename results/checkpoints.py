"""The accuracy of the newest checkpoint of a run on chosen images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from feddumap.config import Config
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split, split
from feddumap.data.sources import catalog
from feddumap.runs.reader import read_checkpoint, read_config
from feddumap.training.evaluation import score_weights
from feddumap.training.samples import Samples

Score = Callable[[np.ndarray, np.ndarray, np.ndarray], float]


def newest(folder: Path) -> tuple[Dataset, Split, int, Score]:
    """A run's data, its split, the round of its newest checkpoint, and what scores that on inputs, labels and
    the indices to take of them."""
    config: Config = read_config(folder)
    state = read_checkpoint(max(folder.glob("checkpoint-*.json"))).state
    data = catalog.get(config.data)

    def score(inputs: np.ndarray, labels: np.ndarray, indices: np.ndarray) -> float:
        samples = Samples.take(inputs, labels, indices)
        return score_weights(state.architecture, state.weights, samples, config).accuracy

    made = split(data.train_labels, len(data.classes), config.data, config.run.seed)
    return data, made, state.round, score
