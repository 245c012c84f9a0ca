"""The newest checkpoint of a run, and its accuracy on chosen images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddumap.config import Config
from feddumap.core.messages import ServerState
from feddumap.data.dataset import Dataset
from feddumap.data.partition import Split, split
from feddumap.data.sources import catalog
from feddumap.runs.reader import read_checkpoint, read_config
from feddumap.training.evaluation import score_weights
from feddumap.training.samples import Samples


@dataclass(frozen=True)
class Trained:
    """A run's newest checkpoint, its data set and how that is split."""

    config: Config
    state: ServerState
    data: Dataset
    split: Split

    def score(self, inputs: np.ndarray, labels: np.ndarray, indices: np.ndarray) -> float:
        """The accuracy on the images of these indices."""
        samples = Samples.take(inputs, labels, indices)
        return score_weights(self.state.architecture, self.state.weights, samples, self.config).accuracy


def newest(folder: Path) -> Trained:
    """The newest checkpoint of a run."""
    config = read_config(folder)
    state = read_checkpoint(max(folder.glob("checkpoint-*.json"))).state
    data = catalog.get(config.data)
    made = split(data.train_labels, len(data.classes), config.data, config.run.seed)
    return Trained(config, state, data, made)
