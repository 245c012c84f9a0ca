"""The `local` slot: how a device trains and what it sends back."""

from dataclasses import replace

import torch

from feddumap.core.algorithm import Local, Plan
from feddumap.core.messages import Upload
from feddumap.device.task import Task
from feddumap.training.loop import full_gradient
from feddumap.training.model import plain
from feddumap.training.optimizers import (
    UpdateRule,
    carried_momentum,
    corrected,
    frozen_momentum,
    momentum,
    sgd,
)
from feddumap.training.samples import Samples


def train_with(rule: UpdateRule) -> Local:
    """E epochs from the global model with the given update rule; the trained model goes up."""
    return lambda task, samples: task.plan(task.model(), samples, rule)


def local_sgd() -> Local:
    """w_k ← w_k − η ∇ℓ(w_k), E·⌈n_k/B⌉ times."""
    return train_with(sgd())


def restarted_momentum(beta: float) -> Local:
    """FedDUM's device side: momentum that begins at zero in each round, so that none is ever sent."""
    return train_with(momentum(beta))


def shared_momentum(beta: float) -> Local:
    """FedDA's device side: momentum that begins as the server's v, and goes back as v_k."""

    def local(task: Task, samples: Samples) -> Plan:
        model = task.model()
        carried = task.received("v/")

        def report(steps: int) -> Upload:
            upload = task.upload(model, samples, steps)
            return replace(upload, extra={f"v/{name}": plain(tensor) for name, tensor in carried.items()})

        return task.plan(model, samples, carried_momentum(beta, carried), report)

    return local


def mime_lite(beta: float) -> Local:
    """MimeLite's device side: steps with the server's frozen s; the full gradient at w goes up too."""

    def local(task: Task, samples: Samples) -> Plan:
        placed = samples.to(task.config.run.device)
        gradient = full_gradient(task.model(), placed, task.shift(placed))
        model = task.model()

        def report(steps: int) -> Upload:
            upload = task.upload(model, samples, steps)
            return replace(upload, extra={f"s/{name}": plain(tensor) for name, tensor in gradient.items()})

        return task.plan(model, samples, frozen_momentum(beta, task.received("s/")), report)

    return local


def scaffold() -> Local:
    """SCAFFOLD's device side (its option II): w_k ← w_k − η (g − c_k + c), then

        c_k⁺ = c_k − c + (w − w_k) / (K η)

    after K steps. c comes with the model; c_k is the device's own and stays with it; c_k⁺ − c_k goes up.
    """

    def local(task: Task, samples: Samples) -> Plan:
        model = task.model()
        shared = task.received("c/")
        own = task.remembered("c/") or {name: torch.zeros_like(c) for name, c in shared.items()}
        before = {name: task.broadcast.weights[name] for name in shared}

        def report(steps: int) -> Upload:
            upload = task.upload(model, samples, steps)
            scale = 1 / (steps * task.broadcast.lr)
            change = {name: scale * (before[name] - upload.weights[name]) - shared[name] for name in shared}
            task.kept.update({f"c/{name}": own[name] + change[name] for name in shared})
            return replace(upload, extra={f"c/{name}": tensor for name, tensor in change.items()})

        shift = {name: shared[name] - own[name] for name in shared}
        return task.plan(model, samples, corrected(shift), report)

    return local
