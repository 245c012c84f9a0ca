"""FedDU: the server also trains on its own data, and moves the model part of the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from feddumap.core.algorithm import Metrics, Progress, RoundView, ServerStep
from feddumap.core.messages import Tensors
from feddumap.core.rng import stream
from feddumap.data.label_mix import divergence
from feddumap.errors import FeddumapError
from feddumap.training import optimizers
from feddumap.training.evaluation import Score, score_weights
from feddumap.training.loop import fit
from feddumap.training.model import make
from feddumap.training.optimizers import masked, sgd
from feddumap.training.samples import Batch, Samples, batches, label_shift

EPSILON = 1e-3
NEGLIGIBLE = 0.001
HELD_OUT = 0.2
DECAYS = (0.9, 0.95, 0.99, 0.999)

AccuracyWeight = Literal["one_minus", "inverse"]


class Reach(NamedTuple):
    """How far to go, α before its decay, and the decays to choose from."""

    alpha: float
    decays: Sequence[float]


ShareRule = Callable[[Score, Samples, RoundView], tuple[Reach, Metrics]]
Trainer = Callable[[Tensors, Samples, RoundView], tuple[Tensors, Tensors]]
"""Trains a copy of the weights on samples; returns it, and tensors that were carried along."""


def interpolate(start: Tensors, end: Tensors, alpha: float) -> Tensors:
    """w½ + α (w_s − w½), batch norm's statistics included; counters stay those of w½.

    Since w_s − w½ = −η τ ḡ0, this is the paper's w½ − τ_eff η ḡ0 with τ_eff = α τ: ḡ0 is never built.
    """
    return {
        name: tensor + alpha * (end[name] - tensor) if tensor.is_floating_point() else tensor
        for name, tensor in start.items()
    }


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


def dynamic(c: float, decay: float | Literal["held-out"], weight: AccuracyWeight) -> ShareRule:
    """FedDU's α, from the accuracy of w½ on the server's data, sizes and non-IID degrees."""

    def rule(scored: Score, server: Samples, view: RoundView) -> tuple[Reach, Metrics]:
        labels = view.context.census.labels
        assert labels is not None
        everyone = labels.sum(axis=0)
        chosen = labels[[receipt.device for receipt in view.receipts]].sum(axis=0)
        own = np.bincount(server.labels.numpy(), minlength=len(everyone))
        degree_devices = float(divergence(chosen, everyone))
        degree_server = float(divergence(own, everyone))
        samples = sum(receipt.samples for receipt in view.receipts)
        alpha = effective_share(
            scored.accuracy, (len(server), degree_server), (samples, degree_devices), c, weight
        )
        metrics = {"degree_devices": degree_devices, "degree_server": degree_server}
        return Reach(alpha, DECAYS if decay == "held-out" else (decay,)), metrics

    return rule


def static(effective_steps: int | Literal["full"]) -> ShareRule:
    """FedDU-S: α = τ_eff / τ with a fixed τ_eff, or all of the server's steps."""

    def rule(scored: Score, server: Samples, view: RoundView) -> tuple[Reach, Metrics]:
        train = view.context.config.train
        tau = train.epochs * math.ceil(len(server) / train.batch)
        return Reach(1.0 if effective_steps == "full" else effective_steps / tau, (1.0,)), {}

    return rule


def server_update(rule: ShareRule, *, hold_out: bool = False, trainer: Trainer | None = None) -> ServerStep:
    """Train a copy on the server's data, then go the share α of the way there.

    With `hold_out`, a fifth of the server's images is kept from training, and of several decays the one whose
    models had the lowest loss on them so far is used: one copy serves them all, only α differs. `trainer` may
    be given to train the copy otherwise; tensors that it carries along go the same share of the way.
    """
    train = trainer or train_copy

    def init(state: object) -> Tensors:
        return {"losses": torch.zeros(len(DECAYS), dtype=torch.float64)} if hold_out else {}

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        config, state = view.context.config, view.state
        server, held = divide(view.context.server, config.run.seed, hold_out)
        # 1. how good is the mean of the devices, and how far should the server go?
        before = evaluate(weights, server, view)
        reach, metrics = rule(before, server, view)
        alphas = [reach.alpha * decay**state.round for decay in reach.decays]
        tau = config.train.epochs * math.ceil(len(server) / config.train.batch)
        metrics = {"server_accuracy": before.accuracy, **metrics}
        if max(alphas) <= NEGLIGIBLE:
            said = {"alpha": max(alphas), "tau_eff": 0.0, "skipped": "negligible", **metrics}
            return weights, {**steps, **view.extra}, said
        # 2. a copy trains τ = E·⌈n0/B⌉ steps
        trained, carried = train(weights, server, view)
        # 3. part of the way, as far as the decay lets it
        choice = 0
        if hold_out:
            losses = [
                evaluate(interpolate(weights, trained, alpha), held, view).mean_loss for alpha in alphas
            ]
            if all(map(math.isfinite, losses)):  # else no later sum could be compared
                summed = steps["losses"] + torch.tensor(losses, dtype=torch.float64)
                steps = {**steps, "losses": summed}
            choice = int(steps["losses"].argmin())
            metrics["decay"] = reach.decays[choice]
        alpha = alphas[choice]
        moved = interpolate(weights, trained, alpha)
        # 4. a step that makes the server's own loss explode is taken back, and said
        after = evaluate(moved, server, view)
        if exploded(before.mean_loss, after.mean_loss, state.architecture.classes):
            said = {"alpha": alpha, "tau_eff": 0.0, "skipped": "exploded", **metrics}
            return weights, {**steps, **view.extra}, said
        steps = {**steps, **interpolate(view.extra, carried, alpha)}
        return moved, steps, {"alpha": alpha, "tau_eff": alpha * tau, **metrics}

    return ServerStep(init, apply)


def divide(server: Samples, seed: int, hold_out: bool) -> tuple[Samples, Samples]:
    """The server's images to train on, and those held out: the same ones in every round."""
    order = torch.from_numpy(stream(seed, "held-out").permutation(len(server))) if hold_out else None
    if order is None:
        return server, server
    if len(server) < 2:
        raise FeddumapError(
            "method.decay = 'held-out' needs at least 2 images on the server: raise data.server_fraction"
        )
    cut = max(1, round(HELD_OUT * len(server)))
    held, kept = order[:cut].sort().values, order[cut:].sort().values
    return (
        Samples(server.images[kept], server.labels[kept]),
        Samples(server.images[held], server.labels[held]),
    )


def evaluate(weights: Tensors, samples: Samples, view: RoundView) -> Score:
    """Accuracy and loss on server data, in eval mode without augmentation."""
    return score_weights(view.state.architecture, weights, samples, view.context.config)


def train_copy(
    weights: Tensors, samples: Samples, view: RoundView, rule: optimizers.UpdateRule | None = None
) -> tuple[Tensors, Tensors]:
    """E epochs of plain SGD (or another rule) at this round's learning rate; nothing is carried along."""
    config = view.context.config
    model = make(view.state.architecture, weights, config.train.kernels, config.run.device)
    rng = stream(config.run.seed, "server-batches", view.state.round)
    placed = samples.to(config.run.device)
    train = config.train
    shift = label_shift(placed.labels, view.state.architecture.classes, train.calibration)
    data = batches(placed, train.epochs, train.batch, rng, augment=config.data.augment, shift=shift)
    total = train.epochs * math.ceil(len(samples) / train.batch)
    inside = masked(rule or sgd(), view.state.mask)
    fit(model, ticking(data, total, view.context.progress), inside, view.lr)
    return model.weights(), {}


def ticking(data: Iterable[Batch], total: int, progress: Progress) -> Iterator[Batch]:
    """Say now and then how many of the server's steps are done."""
    for step, batch in enumerate(data):
        if step % 50 == 0:
            progress("server steps", step, total)
        yield batch


def exploded(before: float, after: float, classes: int) -> bool:
    """Whether a loss left all bounds: not finite, or twice what it was and what guessing gives (ln C)."""
    return not math.isfinite(after) or after > 2 * max(before, math.log(classes))
