"""FedProx (Li et al., 2020): FedAvg with a proximal term in the devices' loss.

device:  w_k ← w_k − η (∇ℓ(w_k) + μ (w_k − w))
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from feddumap.config_sections import LARGEST
from feddumap.core.algorithm import Algorithm
from feddumap.methods.fedavg import train_with
from feddumap.methods.registry import Settings, method
from feddumap.training.optimizers import proximal


class Proximal(Settings):
    mu: Annotated[float, Field(ge=0, le=LARGEST, description="μ, the pull to the global model")] = 0.01


@method("fedprox")
def fedprox(settings: Proximal) -> Algorithm:
    """FedAvg whose devices are pulled back to the global model (Li et al.)."""
    return Algorithm(local=train_with(proximal(settings.mu)))
