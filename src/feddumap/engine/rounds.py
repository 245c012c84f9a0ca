"""The loop of training rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from feddumap.config import Config
from feddumap.core.algorithm import (
    Algorithm,
    Census,
    Cohort,
    Context,
    Labels,
    Metrics,
    Receipt,
    RoundView,
)
from feddumap.core.clock import Timing, Work, require_finisher
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
from feddumap.core.record import Record
from feddumap.core.rng import layer_noise
from feddumap.core.screening import PREFIX, separate_tensors
from feddumap.core.tensors import all_finite, same_form
from feddumap.engine.census import begin_census, join_census
from feddumap.errors import FeddumapError
from feddumap.models.cost import full_macs, macs, parameters
from feddumap.models.frozen import frozen_bytes
from feddumap.system.callbacks import Progress
from feddumap.training.evaluation import Score, device_accuracy, score_weights, score_within

Evaluate = Callable[[ServerState], Score]


def initial_state(architecture: Architecture, algorithm: Algorithm, weights: Tensors) -> ServerState:
    """The state before round 0: the initial weights and the initial tensors of the server steps."""
    state = ServerState(0, architecture, weights)
    return replace(state, steps=algorithm.server.init(state))


def broadcast_of(state: ServerState, config: Config) -> Broadcast:
    """The broadcast of the next round; lr_t = lr · decay^t, t from 0."""
    lr = config.train.lr * config.train.lr_decay**state.round
    return Broadcast(state.round, state.architecture, state.weights, lr, mask=state.mask)


def take_census(
    cohort: Cohort,
    state: ServerState,
    config: Config,
    labels: Labels,
    whole: bool = False,
    earlier: Census | None = None,
) -> Census:
    """Ask the devices for their number of samples and, if the method needs them, their label counts."""
    return begin_census(cohort, broadcast_of(state, config), config.data.devices, labels, whole, earlier)


def rounds(
    state: ServerState,
    algorithm: Algorithm,
    context: Context,
    cohort: Cohort,
    evaluate: Evaluate,
    remember: Callable[[Census], None] = lambda _: None,
) -> Iterator[tuple[ServerState, Record]]:
    """Train from `state` to the configured number of rounds; yields the state and record of each round.
    `remember` is called with the census when devices have joined it."""
    config = context.config
    shared = min(algorithm.shared, len(context.server))  # samples the server sends each device, once
    everyone = range(config.data.devices)
    shared_bytes = shared * len(everyone) * _sample_bytes(context)
    last = algorithm.rounds(config)
    sent_once = state.architecture.frozen if state.round else ""  # the frozen tensors that devices have
    while state.round < last:
        # 0. devices that were absent may have joined
        chosen = algorithm.choose(config, state.round, context.secret)
        if context.census.missing:
            census = join_census(
                context.census, cohort, broadcast_of(state, config), algorithm.labels, chosen
            )
            if len(census.missing) < len(context.census.missing):
                remember(census)
            context = replace(context, census=census)

        # 1. reshape: the model changes shape in some rounds
        metered = MeteredCohort(cohort)
        asked = algorithm.screening.asked(state, context, metered)
        state, shape_metrics = algorithm.reshape(state, *asked)

        # 2. select: devices that would miss the deadline are dropped
        message = replace(broadcast_of(state, config), extra=algorithm.send(state))
        present = context.census.present(chosen)
        timing = context.clock.round(present, _work(algorithm, message, context, present, shared))
        if present and not timing.finished:
            there = context.census.present(everyone)
            require_finisher(context.clock, there, _work(algorithm, message, context, there, shared))

        # 3. train: uploads are checked as they arrive
        absent = {str(k): why for k, why in context.census.missing.items() if k in chosen}
        upload_filter = UploadFilter(message, timing, context.progress)
        kept, steps = separate_tensors(state.steps)
        counted: list[Receipt] = []
        view = RoundView(context, state, message.lr, counted)
        screening = algorithm.screening.begin(kept, view)
        view = replace(view, combine=screening.combine)
        admitted = upload_filter.admit(cohort.train(message, timing.finished))
        uploads = _noted(screening.admit(admitted), upload_filter.receipts, counted)

        # 4. aggregate; 5. server step
        weights = state.weights
        metrics: Metrics = {}
        if timing.finished or algorithm.screening.empty_rounds:
            with layer_noise(config.run.seed, "layers", state.round):
                merged = algorithm.aggregate(uploads, view)
                view = screening.disclose(replace(view, extra=merged.extra))
                weights, steps, metrics = algorithm.server.apply(merged.weights, steps, view)
            kept, screened = screening.end()
            metrics = {**merged.metrics, **metrics, **screened}
        steps = {**steps, **{f"{PREFIX}{name}": tensor for name, tensor in kept.items()}}

        # 6. advance the round and the clock; every device is sent frozen tensors when they are new
        number = state.round
        constants = 0
        if message.architecture.frozen != sent_once:
            sent_once, constants = message.architecture.frozen, frozen_bytes(message.architecture)
        seconds = timing.seconds + (context.clock.transfer(everyone, constants) if constants else 0.0)
        if number == 0 and algorithm.shared_on_clock:
            seconds += context.clock.transfer(everyone, shared_bytes // len(everyone))
        state = replace(state, round=number + 1, weights=weights, steps=steps, clock=state.clock + seconds)
        due = state.round % config.run.evaluate_every == 0 or state.round == last
        score = evaluate(state) if due else None
        validation = _validation_score(state, context) if due else {}
        by_device = device_accuracy(score) if score else None
        backdoor = _backdoor(score) if score else {}
        yield (
            state,
            Record(
                round=number,
                accuracy=score.accuracy if score else None,
                loss=_finite(score.mean_loss) if score else None,
                lr=message.lr,
                devices=list(upload_filter.receipts),
                samples=sum(receipt.samples for receipt in upload_filter.receipts.values()),
                parameters=active_parameters(state),
                macs=macs(state.architecture),
                bytes_down=message.nbytes * len(present)
                + metered.down
                + constants * len(everyone)
                + (0 if number else shared_bytes),
                bytes_up=upload_filter.nbytes + metered.up,
                clock=state.clock,
                metrics={
                    **shape_metrics,
                    **metrics,
                    **validation,
                    **({"device_accuracy": by_device} if by_device else {}),
                    **backdoor,
                    **upload_filter.metrics({**absent, **metered.lost}),
                },
            ),
        )


def _noted(
    uploads: Iterable[Upload], received: Mapping[int, Receipt], counted: list[Receipt]
) -> Iterator[Upload]:
    """Pass on the uploads that count, and note the receipt of each."""
    for upload in uploads:
        counted.append(received[upload.device])
        yield upload


class MeteredCohort:
    """A cohort that counts the bytes of its surveys: the broadcast to each device asked and each answer.
    Missing answers are collected in `lost` and not passed on."""

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort
        self.down = self.up = 0
        self.lost: dict[str, str] = {}

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload | MissingUpload]:
        return self._cohort.train(broadcast, devices)

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        for answer in self._cohort.survey(question, broadcast, devices):
            self.down += broadcast.nbytes
            if answer.lost:
                self.lost[str(answer.device)] = answer.lost
                continue
            self.up += answer.nbytes
            yield answer


class UploadFilter:
    """Passes valid uploads to the aggregation one at a time and keeps a receipt of each.

    A device whose model is not finite or whose upload is missing is skipped and named in the record. A model
    with other names or shapes is an error, since this process and its devices run the same code; uploads
    over a network are checked on arrival, and invalid ones are missing uploads.
    """

    def __init__(self, message: Broadcast, timing: Timing, progress: Progress) -> None:
        self._message, self._timing, self._progress = message, timing, progress
        self._rejected: list[int] = []
        self._lost: dict[str, str] = {}
        self.receipts: dict[int, Receipt] = {}
        self.nbytes = 0  # of the models that arrived, rejected ones included

    def admit(self, uploads: Iterable[Upload | MissingUpload]) -> Iterator[Upload]:
        expected = len(self._timing.finished)
        for count, upload in enumerate(uploads, start=1):
            self._progress("devices", count, expected)
            if isinstance(upload, MissingUpload):
                self._lost[str(upload.device)] = upload.reason
                continue
            valid = same_form(upload.weights, self._message.weights) and _extra_matches_weights(upload)
            if upload.round != self._message.round or not valid:
                raise FeddumapError(
                    f"device {upload.device} answered round {self._message.round} with a model of round "
                    f"{upload.round} or of another form: use the same version and method on both"
                )
            self.nbytes += upload.nbytes(self._message.mask)
            finite = upload.finite
            if finite is None:
                finite = all_finite(upload.weights) and all_finite(upload.extra)
            if not finite:
                self._rejected.append(upload.device)
                continue
            self.receipts[upload.device] = Receipt(upload.device, upload.samples, upload.steps)
            yield upload
        if not expected:
            return
        if not self.receipts and self._lost:
            device, reason = next(iter(self._lost.items()))
            raise FeddumapError(
                f"round {self._message.round}: none of {expected} devices sent a usable model "
                f"(device {device}: {reason}): fix that, then run `feddumap resume DIR`"
            )
        if not self.receipts:
            raise FeddumapError(
                f"round {self._message.round}: the models of all {expected} devices diverged (NaN or "
                f"infinite): lower train.lr (it was {self._message.lr:g} in this round)"
            )

    def metrics(self, unanswered: Mapping[str, str]) -> Metrics:
        """The devices left out of this round or of its survey, for the record; empty if there are none."""
        dropped, lost = list(self._timing.dropped), {**unanswered, **self._lost}
        left_out: Metrics = {"dropped": dropped, "rejected": self._rejected, "lost": lost}
        found = {name: devices for name, devices in left_out.items() if devices}
        return {**found, **self._dominant()}

    def _dominant(self) -> Metrics:
        """The device whose samples are more than half of those of three or more devices: what it claims to
        have decides the round."""
        if len(self.receipts) < 3:
            return {}
        largest = max(self.receipts.values(), key=lambda receipt: receipt.samples)
        share = largest.samples / sum(receipt.samples for receipt in self.receipts.values())
        return {"dominant": {"device": largest.device, "share": share}} if share > 0.5 else {}


def _extra_matches_weights(upload: Upload) -> bool:
    """Whether every extra tensor has the shape and dtype of the weight it is named after."""
    for name, tensor in upload.extra.items():
        like = upload.weights.get(name.rsplit("/", 1)[-1])
        if like is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
            return False
    return True


def _validation_score(state: ServerState, context: Context) -> Metrics:
    """The model's score on the validation images, if there are any: among all classes, and `within` those
    that the validation images have."""
    if context.validation is None:
        return {}
    given = (state.architecture, state.weights, context.validation, context.config)
    score, within = score_weights(*given), score_within(*given)
    return {
        "validation": {
            "accuracy": score.accuracy,
            "loss": _finite(score.mean_loss),
            "within": within.accuracy,
        }
    }


def _sample_bytes(context: Context) -> int:
    return context.server.nbytes // max(1, len(context.server))


def _work(
    algorithm: Algorithm, message: Broadcast, context: Context, chosen: Sequence[int], shared: int
) -> Work:
    config, samples = context.config, context.census.samples[list(chosen)]
    return Work(
        macs=macs(message.architecture),
        full_macs=full_macs(message.architecture),
        bytes_down=message.nbytes,
        bytes_up=algorithm.reply(message),
        samples=algorithm.passes(samples, shared, config),
        own=samples * config.train.epochs,
    )


def active_parameters(state: ServerState) -> int:
    """The number of trainable parameters that the mask, if any, keeps."""
    masked = sum(int((~kept).sum()) for kept in state.mask.values())
    return parameters(state.architecture) - masked


def _backdoor(score: Score) -> Metrics:
    """The share of triggered test images that are predicted as the attacker wants, if a backdoor is tried."""
    success, count = score.backdoor
    return {"backdoor": success / count} if count else {}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
