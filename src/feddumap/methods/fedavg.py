"""FedAvg (McMahan et al., 2017): devices train with SGD, the server takes the weighted mean.

device:  w_k ← w_k − η ∇ℓ(w_k), E·⌈n_k/B⌉ times from w_k = w
server:  w ← Σ n_k w_k / Σ n_k
"""

from __future__ import annotations

from feddumap.core.algorithm import Algorithm, Local
from feddumap.methods.registry import method
from feddumap.training.optimizers import UpdateRule, sgd


def train_with(rule: UpdateRule) -> Local:
    """The device side of FedAvg with any update rule: E epochs from the global model, whose result is
    uploaded."""
    return lambda task, samples: task.plan(task.model(), samples, rule)


@method("fedavg")
def fedavg() -> Algorithm:
    """Federated averaging: devices train with SGD, the server takes the weighted mean (McMahan et al.)."""
    return Algorithm(local=train_with(sgd()))
