"""PruneFL: a first mask found by one device, then masks that follow the devices' gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from feddumap.algorithm import Cohort, Context, Local, Metrics, Reshape
from feddumap.device.evaluation import score
from feddumap.device.task import Task, plain, weights_of
from feddumap.device.training import Samples, batches, fit, masked, sgd, watched
from feddumap.errors import FeddumapError
from feddumap.pruning.adjust import SHARE, Costs, adjust, costs_of, share_at, swap
from feddumap.pruning.masks import changes, put_on
from feddumap.selection import select
from feddumap.tensors import all_finite
from feddumap.types import Answer, Broadcast, Question, ServerState, Tensors, Upload

SAMPLES, BATCH, LEARNING_RATE = 200, 20, 0.1
STRETCH = 50  # steps between two adjustments of the first mask
SETTLED, CHANGES = 0.1, 5  # the first mask is found after so many changes of its density in a row below that


def reporting(base: Local, every: int) -> Local:
    """A device that trains as in `base` and adds up, over the rounds it takes part in, (Σ g)² of its rounds'
    dense gradients. It sends the sum in each `every`-th round, and begins again."""

    def local(task: Task, samples: Samples) -> Upload:
        sums: Tensors = {}

        def see(grads: dict[str, torch.Tensor]) -> None:
            for name in task.broadcast.mask:
                sums[name] = sums[name] + grads[name] if name in sums else grads[name].clone()

        upload = base(replace(task, watch=see), samples)
        known = task.remembered("g2/")
        squares = {name: plain(total).square() for name, total in sums.items()}
        total = {f"g2/{name}": known[name] + g if name in known else g for name, g in squares.items()}
        if (task.broadcast.round + 1) % every:
            task.kept.update(total)
            return upload
        task.kept.update({name: torch.zeros_like(tensor) for name, tensor in total.items()})
        return replace(upload, extra={**upload.extra, **total})

    return local


def reply_nbytes(message: Broadcast, every: int) -> int:
    """An upload's bytes: when it reports, with a float for each weight that can be masked."""
    reports = (message.round + 1) % every == 0
    return message.reply_nbytes + reports * sum(4 * kept.numel() for kept in message.mask.values())


def first_pruning(steps: int) -> Reshape:
    """Before the first round one device finds a mask with its own data; the model begins anew under it."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        costs = round_costs(state, context)
        settings = {"fixed": costs.fixed, "weight": dict(costs.weight), "steps": steps}
        message = Broadcast(state.round, state.architecture, state.weights, 0.0)
        device = select(context.config, state.round)[0]
        context.progress("first pruning", 0, 1)
        (answer,) = cohort.survey(Question("first-mask", settings), message, [device])
        mask = unpacked(answer, {name: state.weights[name].shape for name in costs.weight})
        context.progress("first pruning", 1, 1)
        dense = {f"dense/{name}": state.weights[name] for name in mask}
        pruned = put_on(state, mask)
        pruned = replace(pruned, steps={**pruned.steps, **dense})
        return pruned, {"pruning": {"device": device, "rate": left_out(mask), "threshold": None}
                        | changes(state, mask)}  # fmt: skip

    return reshape


def adjustment() -> Reshape:
    """The mask is adjusted to the squared gradients that the devices sent. The server keeps dense weights."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        squares, dense = _under(state.steps, "g2/"), _under(state.steps, "dense/")
        if not squares:
            return state, {"pruning_skipped": "no squared gradients arrived in the last round"}
        share = share_at(state.round)
        mask = adjust(state.weights, state.mask, squares, round_costs(state, context), share)
        weights, whole = swap(state.weights, state.mask, dense, mask)
        own = {name: t for name, t in state.steps.items() if not name.startswith(("g2/", "dense/"))}
        adjusted = put_on(replace(state, weights=weights, steps=own), mask)
        adjusted = replace(
            adjusted, steps={**adjusted.steps, **{f"dense/{name}": t for name, t in whole.items()}}
        )
        return adjusted, {"pruning": {"rate": left_out(mask), "threshold": None, "share": share}
                          | changes(state, mask)}  # fmt: skip

    return reshape


def round_costs(state: ServerState, context: Context) -> Costs:
    """What a round of the devices that come next would last, by the run's own clock."""
    devices = select(context.config, state.round)
    samples = context.census.samples[devices] * context.config.train.epochs
    return costs_of(state.architecture, context.clock, devices, samples)


def first_mask(question: Question, task: Task) -> Answer:
    """A device's answer: the mask it found with its own images, a bit a weight."""
    settings = question.settings
    costs = Costs(settings["fixed"], settings["weight"])
    samples = task.holdings.samples(task.device)
    chosen = task.rng("first-mask").permutation(len(samples))[:SAMPLES]
    some = Samples(samples.images[chosen], samples.labels[chosen])
    found = Finding(task.network(), some, costs, task.broadcast.architecture.classes)
    mask = found.run(settings["steps"], task.rng("first-mask-batches"))
    return Answer(task.device, tensors={name: torch.from_numpy(np.packbits(m)) for name, m in mask.items()})


@dataclass
class Finding:
    """SGD on a few images that adjusts its mask every 50 steps, until the mask has settled."""

    network: nn.Module
    samples: Samples
    costs: Costs
    classes: int

    def run(self, steps: int, rng: np.random.Generator) -> Tensors:
        names = list(self.costs.weight)
        dense = {name: t for name, t in weights_of(self.network).items() if name in names}
        mask = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in dense.items()}
        data = batches(self.samples, steps, BATCH, rng, augment=False)
        calm = 0
        for _ in range(0, steps, STRETCH):
            squares = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in dense.items()}

            def see(grads: Mapping[str, torch.Tensor], squares: Tensors = squares) -> None:
                for name, total in squares.items():
                    total.add_(grads[name].double().square())

            fit(self.network, islice(data, STRETCH), watched(masked(sgd(), mask), see), LEARNING_RATE)
            weights = weights_of(self.network)
            if not (all_finite(weights) and all_finite(squares)):
                raise FeddumapError(
                    "prunefl: the first pruning diverged (NaN or infinite) on its device: choose another "
                    "run.seed, or a model that trains at a learning rate of 0.1"
                )
            if score(self.network, self.samples).accuracy < 1.5 / self.classes:
                continue
            new = adjust(weights, mask, squares, self.costs, SHARE)
            weights, dense = swap(weights, mask, dense, new)
            before, mask = 1 - left_out(mask), new
            self.network.load_state_dict(weights)
            calm = calm + 1 if abs(1 - left_out(mask) - before) <= SETTLED * before else 0
            if calm == CHANGES:
                break
        return mask


def left_out(mask: Tensors) -> float:
    """The share of weights that a mask leaves out."""
    return 1 - sum(int(kept.sum()) for kept in mask.values()) / sum(kept.numel() for kept in mask.values())


def unpacked(answer: Answer, shapes: Mapping[str, Any]) -> Tensors:
    """A mask from the wire: one bit for each weight that can be masked, no more and no less."""
    mask: Tensors = {}
    for name, shape in shapes.items():
        bits, size = answer.tensors.get(name), int(np.prod(shape))
        if bits is None or bits.dtype != torch.uint8 or bits.shape != (-(-size // 8),):
            raise FeddumapError(
                f"device {answer.device} sent no mask for {name}: expected {size} bits; server and device "
                "differ in version or model"
            )
        mask[name] = torch.from_numpy(np.unpackbits(bits.numpy(), count=size).astype(bool)).view(shape)
    return mask


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
