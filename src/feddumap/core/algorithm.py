"""A federated method is five small slots. `feddumap.methods` has every method in these terms.

The whole life of a method, on a model of one number (`w`) and devices that each pull it to their own value:

>>> import torch
>>> def pull(task, samples):                        # local: what a device does (here it trains no network)
...     return Upload(device=task, round=0, samples=1, steps=1, weights={"w": torch.tensor([float(task)])})
>>> def halve(weights, steps, view):                # server: what is done to the mean
...     return {"w": weights["w"] / 2}, steps, {"halved": True}
>>> toy = Algorithm(local=pull, server=ServerStep(init=lambda state: {}, apply=halve))
>>> uploads = [toy.local(device, None) for device in (2, 4)]
>>> view = RoundView(context=None, state=None, lr=0.1, receipts=[])
>>> mean = toy.aggregate(uploads, view)
>>> weights, steps, metrics = toy.server.apply(mean.weights, {}, view)
>>> weights["w"], metrics
(tensor([1.5000]), {'halved': True})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from feddumap.config import Config
from feddumap.core.clock import Clock
from feddumap.core.messages import (
    Answer,
    Architecture,
    Broadcast,
    MissingUpload,
    Question,
    ServerState,
    Tensors,
    Upload,
)
from feddumap.core.sampling import select
from feddumap.core.screening import NO_SCREENING, Combine, Screening
from feddumap.core.tensors import weighted_mean
from feddumap.system.callbacks import Progress, ignore

if TYPE_CHECKING:
    from feddumap.device.task import Task
    from feddumap.training.model import Model
    from feddumap.training.optimizers import UpdateRule
    from feddumap.training.samples import Batch, Samples

Labels = Literal["none", "counts", "gradient"]
Metrics = dict[str, Any]
"""What a step reports of itself for the round's record; JSON."""


@dataclass(frozen=True)
class Census:
    """What the devices have said of their data: samples of each, and labels [N, C] where asked.

    `missing` are the devices that have not answered yet, and why. They do not take part until they have; one
    that never answered counts with no samples. In a simulation there are none.
    """

    samples: np.ndarray
    labels: np.ndarray | None = None
    missing: Mapping[int, str] = field(default_factory=dict)

    def present(self, devices: Sequence[int]) -> list[int]:
        """Those of the devices that have answered."""
        return [device for device in devices if device not in self.missing]


@dataclass(frozen=True)
class Context:
    """What every server-side step may see. Test data is not in it. Over a run it stays the same, except for
    the census, which devices may join.

    `validation` are images that the server keeps from all training. `secret` seeds, in place of the run's
    seed, what must not be predictable: the cohorts and the noise of a private run.
    """

    config: Config
    server: Samples
    census: Census
    clock: Clock
    progress: Progress = ignore
    validation: Samples | None = None
    secret: int | None = None


@dataclass(frozen=True)
class RoundView:
    """What the server sees in a round: the state before, the receipts of the uploads that counted and, once
    they are merged, what else they carried. `combine` is how an aggregation makes one model of several: the
    weighted mean, unless the configuration asks for another rule."""

    context: Context
    state: ServerState
    lr: float
    receipts: Sequence[Receipt]
    extra: Tensors = field(default_factory=dict)
    combine: Combine = weighted_mean


@dataclass(frozen=True)
class Receipt:
    """An upload without its tensors, which need not be kept."""

    device: int
    samples: int
    steps: int


class Cohort(Protocol):
    """Where devices are: in this process, in a pool of processes, or behind a network. The one seam."""

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload | MissingUpload]:
        """Uploads in the order of `devices`, whenever each was ready; a loss where there is none."""
        ...

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        """Ask without training; answers in the order of `devices`."""
        ...


@dataclass(frozen=True)
class Merged:
    """One model made of the uploads, what else they carried, and what there is to report."""

    weights: Tensors
    extra: Tensors = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How a device trains one model in a round: `model` is trained on `batches` by `rule`, then `report`
    makes the upload, given the number of steps."""

    model: Model
    batches: Iterable[Batch]
    rule: UpdateRule
    report: Callable[[int], Upload]


Local = Callable[["Task", "Samples"], Plan | Upload]
"""A plan for training one model, or the upload itself of a device that trains in another way."""
DeviceData = Callable[["Task"], "Samples"]
Aggregate = Callable[[Iterable[Upload], RoundView], Merged]
Send = Callable[[ServerState], Tensors]
Reshape = Callable[[ServerState, Context, Cohort], tuple[ServerState, Metrics]]


@dataclass(frozen=True)
class ServerStep:
    """What the server does to the aggregated weights: a pair of pure functions, like an optax transform.

    `init` makes the step's own named tensors from the first state; `apply` takes the aggregated weights and
    those tensors and returns both anew, with what it reports.
    """

    init: Callable[[ServerState], Tensors]
    apply: Callable[[Tensors, Tensors, RoundView], tuple[Tensors, Tensors, Metrics]]


IDENTITY = ServerStep(init=lambda _: {}, apply=lambda weights, steps, _: (weights, steps, {}))
"""Take the aggregated weights as they are."""


def chain(*links: ServerStep) -> ServerStep:
    """One step after another. The tensors of the i-th are kept under `i/`."""

    def init(state: ServerState) -> Tensors:
        return {
            f"{i}/{name}": value for i, link in enumerate(links) for name, value in link.init(state).items()
        }

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        kept: Tensors = {}
        metrics: Metrics = {}
        for i, link in enumerate(links):
            prefix = f"{i}/"
            own = {name.removeprefix(prefix): t for name, t in steps.items() if name.startswith(prefix)}
            weights, own, said = link.apply(weights, own, view)
            kept |= {f"{prefix}{name}": value for name, value in own.items()}
            metrics |= said
        return weights, kept, metrics

    return ServerStep(init, apply)


def beside(server: ServerStep, *prefixes: str) -> ServerStep:
    """A server step, and tensors of the reshaping step's beside its own: those under the prefixes are left
    alone, and what uploads carry under them is kept for it."""

    def reserved(name: str) -> bool:
        return name.startswith(prefixes)

    def apply(weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        kept = {name: tensor for name, tensor in {**steps, **view.extra}.items() if reserved(name)}
        own = {name: tensor for name, tensor in steps.items() if not reserved(name)}
        carried = {name: tensor for name, tensor in view.extra.items() if not reserved(name)}
        weights, own, metrics = server.apply(weights, own, replace(view, extra=carried))
        return weights, {**own, **kept}, metrics

    return ServerStep(server.init, apply)


def at_round(number: int, change: Reshape) -> Reshape:
    """Change the shape once, when `number` rounds have finished."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        return change(state, context, cohort) if state.round == number else (state, {})

    return reshape


def every(rounds: int, change: Reshape) -> Reshape:
    """Change the shape again and again, whenever so many more rounds have finished."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        due = state.round > 0 and state.round % rounds == 0
        return change(state, context, cohort) if due else (state, {})

    return reshape


def first_of(*changes: Reshape) -> Reshape:
    """The first of several reshaping steps that has something to do, or to say."""

    def reshape(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        for change in changes:
            changed, metrics = change(state, context, cohort)
            if changed is not state or metrics:
                return changed, metrics
        return state, {}

    return reshape


def own_data(task: Task) -> Samples:
    """A device trains on what it holds."""
    return task.holdings.samples(task.device)


def with_shared(limit: int) -> DeviceData:
    """A device trains on what it holds and on what the server gave it (Data-sharing)."""

    def device_data(task: Task) -> Samples:
        return task.holdings.samples(task.device) + task.holdings.shared(task.device, limit)

    return device_data


def mean_of_uploads(uploads: Iterable[Upload], view: RoundView) -> Merged:
    """w = Σ n_k w_k / Σ n_k, and so for what else they carry; one upload in memory at a time."""
    names: list[str] = []

    def parts() -> Iterator[tuple[float, Tensors]]:
        for upload in uploads:
            names[:] = upload.weights
            yield upload.weight, {**upload.weights, **upload.extra}

    mean = view.combine(parts())
    weights = {name: mean.pop(name) for name in names or view.state.weights}
    return Merged(weights, mean)


def never(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
    """Keep the model's shape."""
    return state, {}


def epochs_over(samples: np.ndarray, given: int, config: Config) -> np.ndarray:
    """E epochs over what a device holds and what it was given."""
    return (samples + given) * config.train.epochs


@dataclass(frozen=True)
class Algorithm:
    """The five slots: what a device trains on, how it trains, how uploads become one model, what the server
    does to it, and whether the model changes shape.

    `labels` says whether devices tell their label mix before the first round, and how: their `counts`, or the
    `gradient` of an output bias. `server_data` says how many images the server needs at least, and
    `check` refuses, before any work, an architecture that the method could not deal with later, and `idle`
    tells which parts of the method can never act in this run, and why. `shared` is
    how many of the server's samples each device is given before the first round, at most; the time that
    takes is on the clock if `shared_on_clock`. `send` is what a broadcast carries besides the weights. For
    the clock, `passes` tells how many samples each chosen device goes through (from their n_k and the number
    given), and `reply` how many bytes it will send. A `one_shot` method has one round, with every device.
    `screening` is not the method's: the configuration's rules for uploads, between their arrival and
    `aggregate`. For those, `updates` says whether an upload is the model that was sent, trained further, and
    `beside_mean` what `aggregate` takes from single uploads besides what `view.combine` makes of them.

    `mean_only` says whether the server needs no upload by itself, but only the weighted mean of all; by
    default it does if `aggregate` is `mean_of_uploads`. `uploads_extra` says whether uploads carry tensors
    besides the model. Secure aggregation goes by both. `calibration` is what `train.calibration` is for this
    method unless the configuration sets it.
    """

    local: Local
    device_data: DeviceData = own_data
    aggregate: Aggregate = mean_of_uploads
    server: ServerStep = IDENTITY
    reshape: Reshape = never
    labels: Labels = "none"
    server_data: int = 0
    check: Callable[[Architecture], object] = lambda _: None
    idle: Callable[[Context], Sequence[str]] = lambda _: ()
    shared: int = 0
    shared_on_clock: bool = False
    send: Send = lambda _: {}
    passes: Callable[[np.ndarray, int, Config], np.ndarray] = epochs_over
    reply: Callable[[Broadcast], int] = lambda message: message.reply_nbytes
    one_shot: bool = False
    screening: Screening = NO_SCREENING
    updates: bool = True
    beside_mean: str = ""
    mean_only: bool | None = None
    uploads_extra: bool = False
    calibration: float = 0.0

    @property
    def needs_single_uploads(self) -> bool:
        """Whether the server looks at the uploads one by one."""
        return self.aggregate is not mean_of_uploads if self.mean_only is None else not self.mean_only

    def rounds(self, config: Config) -> int:
        """How many rounds a run has."""
        return min(1, config.train.rounds) if self.one_shot else config.train.rounds

    def choose(self, config: Config, number: int, secret: int | None = None) -> Sequence[int]:
        """The devices of a round."""
        return range(config.data.devices) if self.one_shot else select(config, number, secret)
