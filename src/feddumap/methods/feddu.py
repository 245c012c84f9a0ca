"""FedDU: after averaging, the server trains a copy on its own data and moves the model part of the way.

    w = w½ + α (w_s − w½),   α = f'(acc) · n0 D' / (n0 D' + n' D0) · C · decay^t,   τ_eff = α τ

w½ is the mean of the devices' models, w_s the copy of it after τ = E·⌈n0/B⌉ SGD steps on the server's data,
acc the accuracy of w½ there, D' and D0 the non-IID degrees of the chosen devices and of the server. FedDU-S
fixes τ_eff instead.

The paper measures D' on the labels of the chosen devices together. When all devices take part, that is 0, and
so is α. With `degree = "device"`, D' is the mean of the chosen devices' own degrees, weighted by n_k, which
stays positive as long as devices differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from feddumap.core.algorithm import Algorithm, Context, Metrics, RoundView, ServerStep
from feddumap.core.messages import Tensors
from feddumap.core.rng import stream
from feddumap.core.sampling import select
from feddumap.data.label_mix import divergence
from feddumap.methods.fedavg import fedavg
from feddumap.methods.idle import Idle
from feddumap.methods.registry import Settings, method
from feddumap.methods.server_training import server_steps, train_copy
from feddumap.methods.settings import LabelMix
from feddumap.training.evaluation import Score, score_weights
from feddumap.training.samples import Samples

EPSILON = 1e-3
NEGLIGIBLE = 0.001
"""With an α up to this the server does not train."""
HELD_OUT = 0.2
"""Share of the server's images kept from training where the decay is chosen on them."""
DECAYS = (0.9, 0.95, 0.99, 0.999)

AccuracyWeight = Literal["one_minus", "inverse"]
Degree = Literal["cohort", "device"]


Scale = Annotated[float, Field(ge=0, allow_inf_nan=False, description="C, the scale of the server's part")]
DegreeOf = Annotated[
    Degree,
    Field(
        description="D', the devices' non-IID degree: of the chosen devices' labels together (cohort: the "
        "paper's; 0 if all take part), or the mean of each device's own (device)"
    ),
]


Decay = Annotated[
    Annotated[float, Field(gt=0, le=1)] | Literal["held-out"],
    Field(description="factor on the server's part, each round; or chosen on held-out server images"),
]


class DynamicUpdate(LabelMix):
    c: Scale = 1.0
    decay: Decay = 0.999
    accuracy_weight: Annotated[AccuracyWeight, Field(description="f'(acc): 1 − acc, or 1/(acc + ε)")] = (
        "one_minus"
    )
    degree: DegreeOf = "cohort"

    @property
    def least_images(self) -> int:
        """What the server needs: an image to train on, and one to hold out if the decay is chosen on it."""
        return 2 if self.decay == "held-out" else 1


class StaticUpdate(Settings):
    effective_steps: Annotated[
        Annotated[int, Field(ge=1)] | Literal["full"], Field(description="τ_eff: 5, 10, 20 …, or full")
    ] = 10


# α


class Share(NamedTuple):
    """α before its decay, and the decays to choose from."""

    alpha: float
    decays: Sequence[float]


ShareRule = Callable[[Score, Samples, RoundView], tuple[Share, Metrics]]
"""Computes the share from the score of w½ on the server's training images; and what to record of it."""


def effective_share(
    accuracy: float,
    server: tuple[int, float],
    devices: tuple[int, float],
    c: float,
    weight: AccuracyWeight,
) -> float:
    """α / decay^t = f'(acc) · n0 D' / (n0 D' + n' D0) · C, for server (n0, D0) and devices (n', D').

    f'(acc) = 1 − acc, or 1/(acc + ε). Where both degrees vanish the ratio is n0 / (n0 + n').

    >>> effective_share(0.5, (400, 0.3), (400, 0.1), 1.0, "one_minus")
    0.125
    >>> effective_share(0.5, (100, 0.0), (300, 0.0), 1.0, "one_minus")
    0.125
    """
    (n0, d0), (n, d) = server, devices
    ratio = n0 * d / (n0 * d + n * d0) if n0 * d + n * d0 > 0 else n0 / (n0 + n)
    factor = 1 - accuracy if weight == "one_minus" else 1 / (accuracy + EPSILON)
    return factor * ratio * c


def degree_of_devices(labels: np.ndarray, chosen: Sequence[int], degree: Degree) -> float:
    """D' of the chosen devices, from the label counts [N, C] of all.

    >>> labels = np.array([[4, 0], [0, 4]])
    >>> degree_of_devices(labels, [0, 1], "cohort"), round(degree_of_devices(labels, [0, 1], "device"), 4)
    (0.0, 0.3113)
    """
    everyone = labels.sum(axis=0)
    own = labels[list(chosen)]
    if degree == "cohort":
        return float(divergence(own.sum(axis=0), everyone))
    sizes = own.sum(axis=1)
    present = sizes > 0
    degrees = [float(divergence(mix, everyone)) for mix in own[present]]
    return float(np.average(degrees, weights=sizes[present])) if degrees else 0.0


def dynamic(update: DynamicUpdate) -> ShareRule:
    """FedDU's α, from the accuracy of w½ on the server's data, sizes and non-IID degrees."""

    def rule(scored: Score, server: Samples, view: RoundView) -> tuple[Share, Metrics]:
        labels = view.context.census.labels
        assert labels is not None
        chosen = [receipt.device for receipt in view.receipts]
        degree_devices = degree_of_devices(labels, chosen, update.degree)
        degree_server = degree_of_server(server, labels)
        samples = sum(receipt.samples for receipt in view.receipts)
        alpha = effective_share(
            scored.accuracy,
            (len(server), degree_server),
            (samples, degree_devices),
            update.c,
            update.accuracy_weight,
        )
        metrics = {"degree_devices": degree_devices, "degree_server": degree_server}
        return Share(alpha, DECAYS if update.decay == "held-out" else (update.decay,)), metrics

    return rule


def degree_of_server(server: Samples, labels: np.ndarray) -> float:
    """D0, from the label counts [N, C] of all devices."""
    own = np.bincount(server.targets.numpy(), minlength=labels.shape[1])
    return float(divergence(own, labels.sum(axis=0)))


def never_acts(update: DynamicUpdate) -> Idle:
    """The `idle` slot: why the server's data would never be used, if so. α is at most its value at acc = 0,
    for the devices that the seed selects in each round."""

    def idle(context: Context) -> list[str]:
        labels, config = context.census.labels, context.config
        if labels is None or not len(context.server):
            return []
        degree_server = degree_of_server(context.server, labels)
        largest = 0.0
        for number in range(config.train.rounds):
            chosen = context.census.present(select(config, number, context.secret))
            if not chosen:
                continue
            degree = degree_of_devices(labels, chosen, update.degree)
            samples = int(context.census.samples[chosen].sum())
            largest = effective_share(
                0.0, (len(context.server), degree_server), (samples, degree), update.c, update.accuracy_weight
            )
            if largest > NEGLIGIBLE:
                return []
            if config.train.cohort == config.data.devices:
                break  # the same devices in every round
        reason = f"α is at most {largest:.2g}"
        if update.c == 0:
            return [f"the server's data is never used: {reason}, as method.c = 0"]
        if update.degree == "device":
            return [f"the server's data is never used: {reason}, as all devices have the same label mix"]
        return [
            f"the server's data is never used: {reason}, as the labels of the chosen devices together are as "
            f"those of all devices (D' = 0; train.cohort = {config.train.cohort} of {config.data.devices}): "
            "set method.degree = 'device', or choose fewer devices a round"
        ]

    return idle


def static(effective_steps: int | Literal["full"]) -> ShareRule:
    """FedDU-S: α = τ_eff / τ with a fixed τ_eff, at most 1, or all of the server's steps."""

    def rule(scored: Score, server: Samples, view: RoundView) -> tuple[Share, Metrics]:
        train = view.context.config.train
        tau = server_steps(len(server), train.epochs, train.batch)
        return Share(1.0 if effective_steps == "full" else min(1.0, effective_steps / tau), (1.0,)), {}

    return rule


# server side

ServerTrainer = Callable[[Tensors, Samples, RoundView], tuple[Tensors, Tensors]]
"""Trains a copy of the weights on samples; returns it and the tensors of `view.extra` trained with it."""


def interpolate(start: Tensors, end: Tensors, alpha: float) -> Tensors:
    """w½ + α (w_s − w½), batch norm's statistics included; counters stay those of w½.

    Since w_s − w½ = −η τ ḡ0, this is the paper's w½ − τ_eff η ḡ0 with τ_eff = α τ: ḡ0 is never built.
    """
    return {
        name: tensor + alpha * (end[name] - tensor) if tensor.is_floating_point() else tensor
        for name, tensor in start.items()
    }


def sgd_trainer(weights: Tensors, samples: Samples, view: RoundView) -> tuple[Tensors, Tensors]:
    """Plain SGD; nothing else is trained."""
    return train_copy(weights, samples, view), {}


def server_update(
    rule: ShareRule, *, hold_out: bool = False, trainer: ServerTrainer = sgd_trainer
) -> ServerStep:
    """Train a copy on the server's data, then move the share α of the way to it.

    With `hold_out`, a fifth of the server's images is kept from training, and of several decays the one whose
    models have had the lowest summed loss on them is used. One trained copy serves all decays: only α
    differs. What `trainer` returns besides the copy is interpolated by the same α.
    """

    def init(state: object) -> Tensors:
        return {"losses": torch.zeros(len(DECAYS), dtype=torch.float64)} if hold_out else {}

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        config, state = view.context.config, view.state
        server, held = divide(view.context.server, config.run.seed, hold_out)
        # 1. α from the accuracy of the devices' mean w½
        before = evaluate(weights, server, view)
        share, metrics = rule(before, server, view)
        alphas = [share.alpha * decay**state.round for decay in share.decays]
        tau = server_steps(len(server), config.train.epochs, config.train.batch)
        metrics = {"server_accuracy": before.accuracy, **metrics}
        if max(alphas) <= NEGLIGIBLE:
            skipped = {"alpha": max(alphas), "tau_eff": 0.0, "skipped": "negligible", **metrics}
            return weights, {**steps, **view.extra}, skipped
        # 2. a copy trains τ = E·⌈n0/B⌉ steps
        trained, carried = trainer(weights, server, view)
        # 3. the decay, where it is chosen on held-out images
        choice = 0
        if hold_out:
            losses = [
                evaluate(interpolate(weights, trained, alpha), held, view).mean_loss for alpha in alphas
            ]
            if all(map(math.isfinite, losses)):  # a sum with an infinite loss could not be compared again
                summed = steps["losses"] + torch.tensor(losses, dtype=torch.float64)
                steps = {**steps, "losses": summed}
            choice = int(steps["losses"].argmin())
            metrics["decay"] = share.decays[choice]
        # 4. the share α of the way
        alpha = alphas[choice]
        moved = interpolate(weights, trained, alpha)
        # 5. a step that makes the server's own loss explode is undone, and recorded
        after = evaluate(moved, server, view)
        if exploded(before.mean_loss, after.mean_loss, state.architecture.classes):
            skipped = {"alpha": alpha, "tau_eff": 0.0, "skipped": "exploded", **metrics}
            return weights, {**steps, **view.extra}, skipped
        steps = {**steps, **interpolate(view.extra, carried, alpha)}
        return moved, steps, {"alpha": alpha, "tau_eff": alpha * tau, **metrics}

    return ServerStep(init, apply)


def divide(server: Samples, seed: int, hold_out: bool) -> tuple[Samples, Samples]:
    """The server's images to train on, and those held out: the same ones in every round."""
    if not hold_out:
        return server, server
    order = torch.from_numpy(stream(seed, "held-out").permutation(len(server)))
    cut = max(1, round(HELD_OUT * len(server)))
    held, kept = order[:cut].sort().values, order[cut:].sort().values
    return (
        server[kept],
        server[held],
    )


def evaluate(weights: Tensors, samples: Samples, view: RoundView) -> Score:
    """Accuracy and loss on server data, in eval mode without augmentation."""
    return score_weights(view.state.architecture, weights, samples, view.context.config)


def exploded(before: float, after: float, classes: int) -> bool:
    """Whether a loss is not finite, or more than twice the larger of what it was and ln C (guessing)."""
    return not math.isfinite(after) or after > 2 * max(before, math.log(classes))


@method("feddu")
def feddu(update: DynamicUpdate) -> Algorithm:
    """Dynamic update: the server also trains on its data and goes part of the way, adaptively."""
    server = server_update(dynamic(update), hold_out=update.decay == "held-out")
    return replace(
        fedavg(),
        server=server,
        labels=update.label_mix,
        server_data=update.least_images,
        idle=never_acts(update),
    )


@method("feddu-s")
def feddu_s(update: StaticUpdate) -> Algorithm:
    """FedDU with a fixed number of effective server steps."""
    return replace(fedavg(), server=server_update(static(update.effective_steps)), server_data=1)
