"""PruneFL (Jiang et al., 2022): a mask found by one device, then adjusted to what each weight gains a second.

first:   before round 0, one device trains on 200 of its images and adjusts the mask until its density settles
device:  trains inside the mask and adds up (Σ g)² of its rounds' dense gradients
server:  every `adjust_every` rounds, keeps the weights with the largest g² per second of a round
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from feddumap.core.algorithm import (
    Algorithm,
    Cohort,
    Context,
    Local,
    Metrics,
    Plan,
    Reshape,
    at_round,
    beside,
    every,
    first_of,
)
from feddumap.core.messages import Answer, Broadcast, Question, ServerState, Tensors, Upload
from feddumap.core.sampling import select
from feddumap.core.tensors import Form, Forms, all_finite, forms_of, same_form
from feddumap.device.surveys import no_values, survey
from feddumap.device.task import Task
from feddumap.errors import FeddumapError
from feddumap.methods.feddu import DynamicUpdate
from feddumap.methods.feddum import DeviceMomentum, ServerMomentum, pruned_method
from feddumap.methods.idle import all_of, never_reached
from feddumap.methods.registry import Settings, method
from feddumap.methods.settings import Base
from feddumap.models.cost import parameters
from feddumap.pruning.adjustment import SHARE, Costs, adjust, adjustable_share, change_mask, weight_costs
from feddumap.pruning.masks import apply_mask, changes
from feddumap.training.backends import make_model
from feddumap.training.evaluation import score
from feddumap.training.loop import fit
from feddumap.training.model import Model, to_cpu
from feddumap.training.optimizers import masked, sgd, with_gradient_hook
from feddumap.training.samples import Samples, batches

SAMPLES, BATCH, LEARNING_RATE = 200, 20, 0.1
LOOK = 10  # passes between two evaluations of the accuracy
EVERY = 50  # passes between two adjustments of the first mask
SETTLED, CHANGES = 0.1, 5  # the first mask is final after 5 density changes of at most 10 % in a row


class Adjusted(Settings):
    adjust_every: Annotated[int, Field(ge=1, description="rounds between two adjustments of the mask")] = 50
    first_passes: Annotated[
        int, Field(ge=0, description="passes over 200 images in which a device finds the first mask, at most")
    ] = 1000


# device side, in rounds


def report_squared_gradients(base: Local, rounds: int) -> Local:
    """A device trains as in `base` and adds up, over the rounds it takes part in, (Σ g)² of their dense
    gradients. It uploads the sum in each `rounds`-th round, and starts again from zero."""

    def local(task: Task, samples: Samples) -> Plan:
        sums: Tensors = {}

        def see(grads: dict[str, torch.Tensor]) -> None:
            for name, grad in grads.items():
                sums[name] = sums[name] + grad if name in sums else grad.clone()

        plan = base(replace(task, watch=see), samples)
        assert isinstance(plan, Plan)  # fedavg, feddu and feddum train one model on a device
        upload_of = plan.report

        def report(steps: int) -> Upload:
            upload = upload_of(steps)
            known = task.remembered("g2/")
            squares = {name: to_cpu(total).square() for name, total in sums.items()}
            total = {f"g2/{name}": known[name] + g if name in known else g for name, g in squares.items()}
            if (task.broadcast.round + 1) % rounds:
                task.kept.update(total)
                return upload
            task.kept.update({name: torch.zeros_like(tensor) for name, tensor in total.items()})
            return replace(upload, extra={**upload.extra, **total})

        return replace(plan, report=report)

    return local


def reply_nbytes(message: Broadcast, rounds: int) -> int:
    """Bytes of an upload: in each `rounds`-th round with a float for each parameter, masked or not."""
    reports = (message.round + 1) % rounds == 0
    return message.reply_nbytes + 4 * parameters(message.architecture) * reports


# server side


def first_pruning(rounds: int) -> Reshape:
    """Before the first round one device finds a mask with its own data; training starts from its model."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        costs = round_costs(state, context)
        settings = {"fixed": costs.fixed, "weight": dict(costs.weight), "rounds": rounds}
        message = Broadcast(state.round, state.architecture, state.weights, 0.0)
        device = context.census.present(select(context.config, state.round))[0]
        context.progress("first pruning", 0, 1)
        (answer,) = cohort.survey(Question("first-mask", settings), message, [device])
        mask, dense = unpacked(answer, state.weights, costs.weight)
        context.progress("first pruning", 1, 1)
        pruned = apply_mask(replace(state, weights=dense), mask)
        pruned = replace(pruned, steps={**pruned.steps, **{f"dense/{name}": dense[name] for name in mask}})
        return pruned, {"pruning": {"device": device, "rate": left_out(mask), "threshold": None}
                        | changes(state, mask)}  # fmt: skip

    return reshape


def adjustment() -> Reshape:
    """Adjust the mask to the squared gradients that the devices uploaded. The server keeps dense weights."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        squares, dense = _under(state.steps, "g2/"), _under(state.steps, "dense/")
        if not squares:
            return state, {"pruning_skipped": "no squared gradients arrived in the last round"}
        share = adjustable_share(state.round)
        mask = adjust(state.weights, state.mask, squares, round_costs(state, context), share)
        weights, whole = change_mask(state.weights, state.mask, dense, mask)
        own = {name: t for name, t in state.steps.items() if not name.startswith(("g2/", "dense/"))}
        adjusted = apply_mask(replace(state, weights=weights, steps=own), mask)
        adjusted = replace(
            adjusted, steps={**adjusted.steps, **{f"dense/{name}": t for name, t in whole.items()}}
        )
        return adjusted, {"pruning": {"rate": left_out(mask), "threshold": None, "share": share}
                          | changes(state, mask)}  # fmt: skip

    return reshape


def round_costs(state: ServerState, context: Context) -> Costs:
    """The duration of a round of the devices selected next, by the run's clock."""
    devices = context.census.present(select(context.config, state.round))
    samples = context.census.samples[devices] * context.config.train.epochs
    return weight_costs(state.architecture, context.clock, devices, samples)


# device side, before the first round


def _mask_forms(question: Question, broadcast: Broadcast) -> Forms:
    weights = forms_of(broadcast.weights)
    bits = {
        f"mask/{name}": Form("uint8", (-(-weights[name].count // 8),)) for name in question.settings["weight"]
    }
    return {**bits, **{f"weights/{name}": form for name, form in weights.items()}}


@survey("first-mask", fault=no_values, forms=_mask_forms)
def first_mask(question: Question, task: Task) -> Answer:
    """A device's answer: the mask that it found with its own images, one bit per weight, and the dense model
    that it trained meanwhile."""
    settings = question.settings
    costs = Costs(settings["fixed"], settings["weight"])
    samples = task.holdings.samples(task.device)
    chosen = task.rng("first-mask").permutation(len(samples))[:SAMPLES]
    some = samples[chosen]
    shape = task.broadcast.architecture
    # on the CPU, whatever run.device is
    model = make_model(shape, task.broadcast.weights, task.config.train.kernels)
    search = Search(model, some, costs, shape.classes, task.shift(some))
    mask, dense = search.run(settings["rounds"], task.rng("first-mask-batches"))
    bits = {f"mask/{name}": torch.from_numpy(np.packbits(kept)) for name, kept in mask.items()}
    return Answer(task.device, tensors={**bits, **{f"weights/{name}": t for name, t in dense.items()}})


@dataclass
class Search:
    """SGD on a few images that adjusts its mask every 50 passes over them, until the mask has settled."""

    model: Model
    samples: Samples
    costs: Costs
    classes: int
    shift: torch.Tensor | None = None

    def run(self, rounds: int, rng: np.random.Generator) -> tuple[Tensors, Tensors]:
        """The mask, and the dense weights."""
        weights = self.model.weights()
        mask = {name: torch.ones_like(weights[name], dtype=torch.bool) for name in self.costs.weight}
        dense = {name: weights[name] for name in mask}
        squares: Tensors = {}
        began, calm = -1, -1  # the first adjustment has none before it to compare with
        for done in range(LOOK, rounds + 1, LOOK):
            self._train(mask, squares, rng)
            if began < 0 and score(self.model, self.samples).accuracy >= 1.5 / self.classes:
                began = done
            if began < 0 or (done - began) % EVERY:
                continue
            weights = self.model.weights()
            new = adjust(weights, mask, squares, self.costs, SHARE)
            weights, dense = change_mask(weights, mask, dense, new)
            self.model.load(weights)
            density, mask = 1 - left_out(mask), new
            settled = calm < 0 or abs(1 - left_out(mask) - density) <= SETTLED * density
            calm = calm + 1 if settled else 0
            squares.clear()
            if calm == CHANGES:
                break
        weights = self.model.weights()
        unmasked = {name: tensor for name, tensor in weights.items() if name not in mask}
        return mask, change_mask(weights, mask, dense, mask)[1] | unmasked

    def _train(self, mask: Tensors, squares: Tensors, rng: np.random.Generator) -> None:
        """Ten passes over the images; adds Σ g² to `squares`."""

        def see(grads: Mapping[str, torch.Tensor]) -> None:
            for name, grad in grads.items():
                square = to_cpu(grad).double().square()
                squares[name] = squares[name] + square if name in squares else square

        data = batches(self.samples, LOOK, BATCH, rng, augment=None, shift=self.shift)
        fit(self.model, data, with_gradient_hook(masked(sgd(), mask), see), LEARNING_RATE)
        if not all_finite(squares):
            raise FeddumapError(
                "prunefl: the first pruning diverged (NaN or infinite) on its device: choose another "
                "run.seed, or a model that trains at a learning rate of 0.1"
            )


def left_out(mask: Tensors) -> float:
    """The share of weights that a mask leaves out."""
    return 1 - sum(int(kept.sum()) for kept in mask.values()) / sum(kept.numel() for kept in mask.values())


def unpacked(answer: Answer, weights: Tensors, names: Iterable[str]) -> tuple[Tensors, Tensors]:
    """The mask and the dense model of an answer, checked: a bit for each weight that can be masked, and
    finite weights of the right shapes."""
    mask: Tensors = {}
    for name in names:
        bits, size = answer.tensors.get(f"mask/{name}"), weights[name].numel()
        if bits is None or bits.dtype != torch.uint8 or bits.shape != (-(-size // 8),):
            raise FeddumapError(
                f"device {answer.device} sent no mask for {name}: expected {size} bits; server and device "
                "differ in version or model"
            )
        flat = np.unpackbits(bits.numpy(), count=size).astype(bool)
        mask[name] = torch.from_numpy(flat).view(weights[name].shape)
    dense = _under(dict(answer.tensors), "weights/")
    if not (same_form(dense, weights) and all_finite(dense)):
        raise FeddumapError(
            f"device {answer.device} sent a first model that is not finite or of another form: server and "
            "device differ in version or model"
        )
    return mask, dense


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


@method("prunefl")
def prunefl(
    base: Base, update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, settings: Adjusted
) -> Algorithm:
    """A mask found by one device, then adjusted to what each weight gains a second (Jiang et al.)."""
    method, rounds = pruned_method(base, update, server, device), settings.adjust_every
    return replace(
        method,
        local=report_squared_gradients(method.local, rounds),
        server=beside(method.server, "g2/", "dense/"),
        reshape=first_of(at_round(0, first_pruning(settings.first_passes)), every(rounds, adjustment())),
        reply=lambda message: reply_nbytes(message, rounds),
        idle=all_of(method.idle, never_reached("adjust_every", rounds)),
        uploads_extra=True,
    )
