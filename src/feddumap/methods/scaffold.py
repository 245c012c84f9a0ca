"""SCAFFOLD (Karimireddy et al., 2020), option II: control variates correct the devices' gradients.

    device:  w_k ← w_k − η (g − c_k + c), K times, then c_k⁺ = c_k − c + (w − w_k) / (K η)
    server:  w ← Σ n_k w_k / Σ n_k,  c ← c + (n_S / n) · mean(c_k⁺ − c_k)

c is sent with the model; c_k stays on its device, and only the change c_k⁺ − c_k is uploaded.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from feddumap.core.algorithm import Algorithm, Local, Metrics, Plan, RoundView, ServerStep
from feddumap.core.messages import Tensors, Upload
from feddumap.device.task import Task
from feddumap.methods.registry import method
from feddumap.methods.server_state import sending, zeros
from feddumap.training.optimizers import corrected
from feddumap.training.samples import Samples

# device side


def train_controlled() -> Local:
    """SGD with the correction c − c_k; the device keeps c_k⁺ and uploads c_k⁺ − c_k with its model."""

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


# server side


def update_control() -> ServerStep:
    """c ← c + (n_S / n) · the mean change of the devices' c_k, weighted by n_k as the models are.

    So c stays Σ n_k c_k / n over all devices. With equal n_k that is the original's |S|/N and plain means.
    """

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        received = sum(receipt.samples for receipt in view.receipts)
        share = received / int(view.context.census.samples.sum())
        return weights, {name: steps[name] + share * change for name, change in view.extra.items()}, {}

    return ServerStep(lambda state: zeros(state, "c/"), apply)


@method("scaffold")
def scaffold() -> Algorithm:
    """Devices' gradients are corrected by control variates that they keep (Karimireddy et al.)."""
    return Algorithm(
        local=train_controlled(), server=update_control(), send=sending("c/"), uploads_extra=True
    )
