"""The `local` slot: how a device trains and what it sends back."""

from dataclasses import replace

from feddumap.algorithm import Local
from feddumap.device.task import Task, plain
from feddumap.device.training import (
    Rule,
    Samples,
    carried_momentum,
    fit,
    frozen_momentum,
    full_gradient,
    momentum,
    sgd,
)
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


def shared_momentum(beta: float) -> Local:
    """FedDA's device side: momentum that begins as the server's v, and goes back as v_k."""

    def local(task: Task, samples: Samples) -> Upload:
        network = task.network()
        carried = task.received("v/")
        rule = carried_momentum(beta, carried)
        steps = fit(network, task.batches(samples), rule, task.broadcast.lr)
        upload = task.upload(network, samples, steps)
        return replace(upload, extra={f"v/{name}": plain(tensor) for name, tensor in carried.items()})

    return local


def mime_lite(beta: float) -> Local:
    """MimeLite's device side: steps with the server's frozen s; the full gradient at w goes up too."""

    def local(task: Task, samples: Samples) -> Upload:
        gradient = full_gradient(task.network(), samples.to(task.config.run.device))
        network = task.network()
        rule = frozen_momentum(beta, task.received("s/"))
        steps = fit(network, task.batches(samples), rule, task.broadcast.lr)
        upload = task.upload(network, samples, steps)
        return replace(upload, extra={f"s/{name}": plain(tensor) for name, tensor in gradient.items()})

    return local
