"""The `local` slot: how a device trains and what it sends back."""

from feddumap.algorithm import Local
from feddumap.device.task import Task
from feddumap.device.training import Rule, Samples, fit, momentum, sgd
from feddumap.types import Upload


def train_with(rule: Rule) -> Local:
    """E epochs from the global model with the given update rule; the trained model goes up."""

    def local(task: Task, samples: Samples) -> Upload:
        network = task.network()
        steps = fit(network, task.batches(samples), rule, task.broadcast.lr)
        return task.upload(network, samples, steps)

    return local


def local_sgd() -> Local:
    """w_k ← w_k − η ∇ℓ(w_k), E·⌈n_k/B⌉ times."""
    return train_with(sgd())


def restarted_momentum(beta: float) -> Local:
    """FedDUM's device side: momentum that begins at zero in each round, so that none is ever sent."""
    return train_with(momentum(beta))
