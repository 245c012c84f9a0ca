"""MimeLite (Karimireddy et al., 2021): devices step with the server's momentum s, which they do not change.

device:  w_k ← w_k − η ((1 − β) g + β s); the full gradient ∇ℓ_k(w) is uploaded too
server:  w ← Σ n_k w_k / Σ n_k,  s ← β s + (1 − β) · Σ n_k ∇ℓ_k(w) / Σ n_k
"""

from __future__ import annotations

from dataclasses import replace

from feddumap.core.algorithm import Algorithm, Local, Metrics, Plan, RoundView, ServerStep
from feddumap.core.messages import Tensors, Upload
from feddumap.device.task import Task
from feddumap.methods.registry import method
from feddumap.methods.server_state import sending, zeros
from feddumap.methods.settings import SharedMomentum
from feddumap.training.loop import full_gradient
from feddumap.training.model import to_cpu
from feddumap.training.optimizers import frozen_momentum
from feddumap.training.samples import Samples

# device side


def train_with_frozen_momentum(beta: float) -> Local:
    """SGD with the received s, and the full gradient at the model received."""

    def local(task: Task, samples: Samples) -> Plan:
        placed = samples.to(task.config.run.device)
        gradient = full_gradient(task.model(), placed, task.shift(placed))
        model = task.model()

        def report(steps: int) -> Upload:
            upload = task.upload(model, samples, steps)
            return replace(upload, extra={f"s/{name}": to_cpu(tensor) for name, tensor in gradient.items()})

        return task.plan(model, samples, frozen_momentum(beta, task.received("s/")), report)

    return local


# server side


def update_momentum(beta: float) -> ServerStep:
    """s ← β s + (1 − β) · the weighted mean of the devices' full gradients at w."""

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        return weights, {name: beta * steps[name] + (1 - beta) * g for name, g in view.extra.items()}, {}

    return ServerStep(lambda state: zeros(state, "s/"), apply)


@method("mime-lite")
def mime_lite(settings: SharedMomentum) -> Algorithm:
    """Devices step with the server's frozen momentum and send a full gradient (Karimireddy et al.)."""
    return Algorithm(
        local=train_with_frozen_momentum(settings.momentum),
        server=update_momentum(settings.momentum),
        send=sending("s/"),
        uploads_extra=True,
        passes=lambda samples, given, config: samples * (config.train.epochs + 1),  # and the full gradient
    )
