"""FedDA (Jin et al.): momentum v that server and devices share, sent both ways.

    device:  v_k ← β v_k + (1 − β) g, w_k ← w_k − η v_k, from v_k = v and w_k = w
    server:  w ← Σ n_k w_k / Σ n_k,  v ← Σ n_k v_k / Σ n_k

The original's w − η · mean P_k with P_k = (w − w_k)/η is the mean of the w_k.
"""

from __future__ import annotations

from dataclasses import replace

from feddumap.core.algorithm import Algorithm, Local, Metrics, Plan, RoundView, ServerStep
from feddumap.core.messages import Tensors, Upload
from feddumap.device.task import Task
from feddumap.methods.feddu import DynamicUpdate, ServerTrainer, dynamic, never_acts, server_update
from feddumap.methods.registry import method
from feddumap.methods.server_state import sending, zeros
from feddumap.methods.server_training import train_copy
from feddumap.methods.settings import SharedMomentum
from feddumap.training.model import to_cpu
from feddumap.training.optimizers import momentum_from
from feddumap.training.samples import Samples

# device side


def train_with_shared_momentum(beta: float) -> Local:
    """SGD with momentum that starts as the server's v; v_k is uploaded with the model."""

    def local(task: Task, samples: Samples) -> Plan:
        model = task.model()
        carried = task.received("v/")

        def report(steps: int) -> Upload:
            upload = task.upload(model, samples, steps)
            return replace(upload, extra={f"v/{name}": to_cpu(tensor) for name, tensor in carried.items()})

        return task.plan(model, samples, momentum_from(beta, carried), report)

    return local


# server side


def keep_momentum() -> ServerStep:
    """v ← the weighted mean of the v_k."""

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        return weights, dict(view.extra), {}

    return ServerStep(lambda state: zeros(state, "v/"), apply)


def momentum_trainer(beta: float) -> ServerTrainer:
    """FedDU's server training with momentum that starts as the mean of the v_k and is returned too."""

    def train(weights: Tensors, samples: Samples, view: RoundView) -> tuple[Tensors, Tensors]:
        carried = {name.removeprefix("v/"): tensor for name, tensor in view.extra.items()}
        trained = train_copy(weights, samples, view, momentum_from(beta, carried))
        return trained, {f"v/{name}": tensor.contiguous().cpu() for name, tensor in carried.items()}

    return train


@method("fedda")
def fedda(settings: SharedMomentum) -> Algorithm:
    """Momentum that server and devices share, sent both ways (Jin et al.)."""
    local = train_with_shared_momentum(settings.momentum)
    return Algorithm(local=local, server=keep_momentum(), send=sending("v/"), uploads_extra=True)


@method("feddu-da")
def feddu_da(update: DynamicUpdate, settings: SharedMomentum) -> Algorithm:
    """FedDU with FedDA's shared momentum."""
    # the server's copy trains with momentum from v, and w and v both go the share α of the way
    trainer = momentum_trainer(settings.momentum)
    step = server_update(dynamic(update), hold_out=update.decay == "held-out", trainer=trainer)
    server = ServerStep(lambda state: {**zeros(state, "v/"), **step.init(state)}, step.apply)
    return replace(
        fedda(settings),
        server=server,
        labels=update.label_mix,
        server_data=update.least_images,
        idle=never_acts(update),
    )
