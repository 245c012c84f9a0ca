"""False training data: other labels, or a trigger with the label of the attacker's choice."""

from __future__ import annotations

import numpy as np
import torch

from feddumap.config import AttackConfig
from feddumap.training.samples import Samples

POISONED = 0.5
"""Share of a device's images that get the trigger."""


def flip_labels(samples: Samples, classes: int) -> Samples:
    """Every label y becomes C − 1 − y.

    >>> flip_labels(Samples(torch.zeros(3, 1), torch.tensor([0, 1, 9])), 10).targets
    tensor([9, 8, 0])
    """
    return Samples(samples.inputs, classes - 1 - samples.targets)


def with_trigger(images: torch.Tensor, side: int) -> torch.Tensor:
    """Copies of stored images [n, h, w, c] with a white square in the corner at the bottom right."""
    marked = images.clone()
    marked[:, -side:, -side:, :] = 255
    return marked


def plant_trigger(samples: Samples, attack: AttackConfig, rng: np.random.Generator) -> Samples:
    """Half of the images get the trigger and the target's label; at least one."""
    count = max(1, round(POISONED * len(samples)))
    chosen = torch.from_numpy(rng.choice(len(samples), count, replace=False))
    inputs, targets = samples.inputs.clone(), samples.targets.clone()
    inputs[chosen] = with_trigger(inputs[chosen], attack.trigger)
    targets[chosen] = attack.target
    return Samples(inputs, targets)


def triggered(samples: Samples, attack: AttackConfig) -> Samples:
    """The images of other classes than the target, with the trigger and the target's label: the share that
    is predicted as such is the success of a backdoor."""
    others = samples[samples.targets != attack.target]
    return Samples(
        with_trigger(others.inputs, attack.trigger), torch.full_like(others.targets, attack.target)
    )
