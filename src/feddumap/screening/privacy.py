"""Device-level differential privacy, with a server that is trusted to add the noise.

    u_k = (w_k − w, what else device k uploads),  c_k = min(1, S / ‖u_k‖)
    (w, rest) ← (w, 0) + (Σ c_k u_k + N(0, z² S²)) / (expected number of devices)

Every device counts the same, whatever its n_k, and the divisor is fixed. Where a method uses label mixes, the
counts of a round's devices are summed with noise in the same release. Server steps see these sums instead of
receipts and census, and reshaping steps the mean of the devices' pruning rates, with noise too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from feddumap.config import Config, PrivacyConfig
from feddumap.core.algorithm import (
    Algorithm,
    Census,
    Cohort,
    Context,
    Receipt,
    RoundView,
    mean_of_uploads,
    never,
)
from feddumap.core.messages import Answer, Broadcast, MissingUpload, Question, ServerState, Tensors, Upload
from feddumap.core.rng import stream
from feddumap.core.screening import Parts, Screening, ScreeningRound, separate_tensors
from feddumap.errors import FeddumapError
from feddumap.screening.accounting import Releases, calibrated

LABEL_SHARE = 0.1
"""Share of a round's budget, in units of 1/z², that is spent on label counts."""


def private(config: Config, algorithm: Algorithm, known: bool) -> Screening:
    """The screening that makes a method's models differentially private; an error if it cannot. `known` says
    that the method is one of this package."""
    require_private(config, algorithm, known)

    def begin(tensors: Tensors, view: RoundView) -> PrivateRound:
        return PrivateRound(config, algorithm, tensors, view)

    def asked(state: ServerState, context: Context, cohort: Cohort) -> tuple[Context, Cohort]:
        labels = separate_tensors(state.steps)[0].get("labels")
        known = _population(config, labels, state.round) if labels is not None else None
        census = (
            Census(np.array([config.data.devices]))
            if algorithm.labels == "none"
            else _census([known if known is not None else np.ones(state.architecture.classes)])
        )
        return replace(context, census=census), PrivateCohort(cohort, context)

    return Screening(begin, asked, empty_rounds=True)


# configuration


def require_private(config: Config, algorithm: Algorithm, known: bool) -> None:
    """Raise an error if a method takes from devices what is not summed with noise, or, if it is none of this
    package, asks them for anything besides their uploads: what it asks is not accounted for."""
    name, settings = config.method.name, config.method.settings
    asks = algorithm.reshape is not never or algorithm.labels != "none"
    reason = ""
    if algorithm.aggregate is not mean_of_uploads:
        reason = "its aggregation uses single uploads besides their mean"
    elif name == "prunefl":
        reason = "one device finds its first mask alone"
    elif asks and not known:
        reason = "it asks devices for more than their uploads (labels or reshape)"
    elif settings.get("rate_nodes") == "selected" and settings.get("rate") != "fixed":
        reason = "method.rate_nodes = 'selected' tells who was selected; 'all' and 'server' do not"
    elif algorithm.reshape is not never and not config.data.server_fraction:
        reason = "without images on the server (data.server_fraction = 0) a single device ranks its units"
    if reason:
        raise FeddumapError(
            f"method.name = {name!r} cannot go with [privacy]: {reason}; choose another method, or leave "
            "[privacy] out"
        )


def completed(config: Config, algorithm: Algorithm) -> PrivacyConfig:
    """The section with δ, and with the noise that a target ε asks for."""
    privacy, devices = config.privacy, config.data.devices
    delta = privacy.delta if privacy.delta is not None else min(1e-5, devices**-1.1)
    if delta >= 1 / devices:
        raise FeddumapError(
            f"privacy.delta = {delta:g}: expected less than 1/data.devices = {1 / devices:g}, since a δ of "
            "that size allows a device to be told outright"
        )
    privacy = privacy.model_copy(update={"delta": delta})
    if privacy.noise is None:
        assert privacy.epsilon is not None
        start = releases(config, algorithm, 1.0)
        found = calibrated(start, algorithm.rounds(config), privacy.epsilon, delta)
        privacy = privacy.model_copy(update={"noise": found.multiplier / start.multiplier})
    return privacy


def releases(config: Config, algorithm: Algorithm, noise: float) -> Releases:
    """What a run with this noise multiplier releases. With label counts, a device's whole contribution is its
    upload and its counts, each in units of the noise on it."""
    settings = config.method.settings
    asks = settings.get("rate", "fixed") != "fixed" and settings.get("rate_nodes") != "server"
    return Releases(
        config.data.devices,
        config.train.cohort,
        config.privacy.sampling,
        noise * math.sqrt(1 - LABEL_SHARE if algorithm.labels != "none" else 1.0),
        config.privacy.rate_noise if asks else None,
        int(settings.get("prune_round", 0)),
    )


def spent(config: Config, algorithm: Algorithm, rounds: int) -> float:
    """ε of a completed configuration after so many rounds."""
    privacy = config.privacy
    assert privacy.noise is not None
    assert privacy.delta is not None
    return releases(config, algorithm, privacy.noise).epsilon(rounds, privacy.delta)


# rounds


class PrivateRound(ScreeningRound):
    """One round: uploads get their factors c_k as they pass, and are summed with noise."""

    def __init__(self, config: Config, algorithm: Algorithm, tensors: Tensors, view: RoundView) -> None:
        assert config.privacy.clip is not None
        assert config.privacy.noise is not None
        self._config, self._algorithm = config, algorithm
        self._clip, self._noise = config.privacy.clip, config.privacy.noise
        self._kept, self._number = dict(tensors), view.state.round
        self._context, self._mask = view.context, view.state.mask
        self._start = {
            **view.state.weights,
            **{name: torch.zeros_like(tensor) for name, tensor in algorithm.send(view.state).items()},
        }
        self._uses_labels = algorithm.labels != "none"
        self._labels = np.zeros(view.state.architecture.classes)
        self._uploads = self._clipped = 0

    def admit(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
        """The uploads with equal weights, times c_k."""
        for upload in uploads:
            factor = clip_factor({**upload.weights, **upload.extra}, self._start, self._clip)
            self._uploads += 1
            self._clipped += factor < 1
            if self._uses_labels:
                counts = self._context.census.labels
                assert counts is not None
                norm, bound = float(np.linalg.norm(counts[upload.device])), self._config.privacy.label_clip
                self._labels += counts[upload.device] * min(1.0, bound / norm if norm else 1.0)
            yield replace(upload, samples=1, factor=factor)

    def combine(self, parts: Parts) -> Tensors:
        """The model before the round plus the noisy sum of changes over the expected number of devices.
        Integers (batch norm's counters) stay as they were, since they count a device's steps."""
        sums = {
            name: torch.zeros(tensor.shape, dtype=torch.float64)
            for name, tensor in sorted(self._start.items())  # in the order of names, as the noise is drawn
            if tensor.is_floating_point()
        }
        for weight, tensors in parts:
            if unknown := sorted(tensors.keys() - self._start.keys()):
                raise FeddumapError(
                    f"uploads carry {unknown[0]!r}, which broadcasts do not: with [privacy] a device may "
                    "send back only tensors of the names that it is sent (`send`)"
                )
            for name, total in sums.items():
                if name in tensors:
                    total.add_(tensors[name].double() - self._start[name].double(), alpha=weight)
        noise, expected = _stream(self._context, "privacy", self._number), self._config.train.cohort
        made = dict(self._start)
        for name, total in sums.items():
            total.add_(torch.from_numpy(noise.standard_normal(total.shape)), alpha=self._noise * self._clip)
            if name in self._mask:
                total.mul_(self._mask[name])
            before = self._start[name]
            made[name] = (before.double() + total / expected).to(before.dtype)
        return made

    def disclose(self, view: RoundView) -> RoundView:
        """The round's devices as one, and all others as a second, with what was released of them."""
        cohort, devices = self._config.train.cohort, self._config.data.devices
        if not self._uses_labels:
            census = Census(np.array([cohort, devices - cohort]))
        else:
            bound = self._config.privacy.label_clip
            scale = self._noise * math.sqrt((1 - LABEL_SHARE) / LABEL_SHARE) * bound
            noise = _stream(self._context, "privacy-labels", self._number).standard_normal(self._labels.shape)
            noisy = self._labels + scale * noise
            total = self._kept.get("labels", torch.zeros(len(noisy), dtype=torch.float64)).numpy() + noisy
            self._kept["labels"] = torch.from_numpy(total)
            everyone = _population(self._config, self._kept["labels"], self._number + 1)
            census = _census([_counts(noisy), np.maximum(everyone - _counts(noisy), 0.0)])
        receipts = [Receipt(0, int(census.samples[0]), 0)]
        return replace(view, receipts=receipts, context=replace(view.context, census=census))

    def end(self) -> tuple[Tensors, dict[str, Any]]:
        epsilon = spent(self._config, self._algorithm, self._number + 1)
        return self._kept, {"epsilon": epsilon, "clipped_uploads": self._clipped}


def clip_factor(tensors: Tensors, start: Tensors, clip: float) -> float:
    """min(1, S / ‖tensors − start‖) over all floating-point tensors together.

    >>> clip_factor({"w": torch.tensor([3.0, 5.0])}, {"w": torch.tensor([0.0, 1.0])}, clip=1.0)
    0.2
    """
    squares = (
        float((tensor.double() - start[name].double() if name in start else tensor.double()).square().sum())
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    )
    norm = math.sqrt(math.fsum(squares))
    return min(1.0, clip / norm) if norm else 1.0


@dataclass(frozen=True)
class PrivateCohort:
    """A cohort that tells of pruning rates only their mean, with noise, as the answer of one device."""

    cohort: Cohort
    context: Context

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload | MissingUpload]:
        raise FeddumapError("with [privacy] devices train in rounds only: choose another method")

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        if question.name != "rate":
            raise FeddumapError(
                f"with [privacy] devices are not asked {question.name!r}, whose answers would need noise of "
                "their own: choose another method"
            )
        if not len(devices):
            return
        config = self.context.config
        noise = _stream(self.context, "privacy-rates", broadcast.round).standard_normal()
        total = 0.0
        for count, answer in enumerate(self.cohort.survey(question, broadcast, devices), start=1):
            self.context.progress("pruning rates", count, len(devices))
            total += min(1.0, max(0.0, float(answer.values["p"])))
        mean = (total + config.privacy.rate_noise * noise) / config.data.devices
        yield Answer(0, {"p": min(1.0, max(0.0, float(mean)))})


def _stream(context: Context, *name: str | int) -> np.random.Generator:
    return stream(context.config.run.seed if context.secret is None else context.secret, *name)


def _counts(noisy: np.ndarray) -> np.ndarray:
    """Counts of at least 0, of which one at least is positive."""
    counts = np.maximum(noisy, 0.0)
    return counts if counts.any() else np.ones_like(counts)


def _population(config: Config, labels: torch.Tensor, rounds: int) -> np.ndarray:
    """The label counts of all devices, from the noisy sums of so many rounds' samples of them."""
    share = rounds * config.train.cohort / config.data.devices
    return _counts(labels.numpy() / share)


def _census(rows: Sequence[np.ndarray]) -> Census:
    """A census in which each group of devices is one."""
    labels = np.array(rows)
    return Census(np.maximum(1, np.round(labels.sum(axis=1))).astype(np.int64), labels)
