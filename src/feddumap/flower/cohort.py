"""A cohort of devices behind Flower's nodes. No device can block or spoil a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from flwr.app import RecordDict
from flwr.serverapp import Grid

from feddumap.config import Config
from feddumap.core.messages import Answer, Broadcast, MissingUpload, Question, ServerState, Upload
from feddumap.device.holdings import SplitHoldings
from feddumap.device.surveys import MOST_SAMPLES
from feddumap.engine.local import Evaluator
from feddumap.errors import FeddumapError
from feddumap.flower import replies, requests
from feddumap.flower.codec import Refused
from feddumap.flower.membership import Member, Membership
from feddumap.flower.requests import Request
from feddumap.flower.transport import Transport
from feddumap.models.frozen import constants_of
from feddumap.training.evaluation import Score

TRIES = 3
SHOWN = 3  # reasons in an error

T = TypeVar("T")
Read = Callable[[RecordDict, int], T | Refused]


class FlowerCohort:
    """Devices are identified by their numbers, which their nodes report. `holdings` are the server's; devices
    with data of their own get up to `shared` images of them each."""

    def __init__(
        self,
        grid: Grid,
        config: Config,
        token: str,
        holdings: SplitHoldings,
        shared: int,
        say: Callable[[str], None] = lambda _: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._token, self._say = config, token, say
        self._holdings, self._shared = holdings, shared
        self.close = close
        self._evaluator = Evaluator.of(holdings.dataset, holdings.split, config)
        self._transport = Transport(grid)
        self._membership = Membership(self._transport, config.data.devices, token, config.run.timeout, say)
        self._samples: dict[int, int] = {}  # the samples that each device reported

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload | MissingUpload]:
        """Uploads in the order of `devices`, with a `MissingUpload` for each device without a valid one; an
        error if too few are valid."""

        def read(content: RecordDict, device: int) -> Upload | Refused:
            most = self._samples.get(device, MOST_SAMPLES) + min(
                self._shared, len(self._holdings.split.server)
            )
            return replies.read_upload(content, broadcast, device, most)

        uploads, reasons = self._ask("train", broadcast, None, devices, read, self._least(devices))
        for device in devices:
            yield uploads.pop(device) if device in uploads else MissingUpload(device, reasons[device])

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        """Answers in the order of `devices`, from all of them; a partial question may lack some."""

        def read(content: RecordDict, device: int) -> Answer | Refused:
            return replies.read_answer(content, question, broadcast, device)

        need = self._least(devices) if question.partial else len(devices)
        answers, reasons = self._ask("query", broadcast, question, devices, read, need)
        if question.name == "census":
            self._samples = {device: answer.values["samples"] for device, answer in answers.items()}
        return (
            answers[device] if device in answers else Answer(device, lost=reasons[device])
            for device in devices
        )

    def _least(self, devices: Sequence[int]) -> int:
        """How many of the devices must reply: `run.least_share` of them."""
        return min(len(devices), max(1, math.ceil(self._config.run.least_share * len(devices))))

    def evaluate(self, state: ServerState) -> Score:
        """Evaluated on the server, which has the test images."""
        return self._evaluator.whole(state)

    def _ask(
        self,
        kind: str,
        broadcast: Broadcast,
        question: Question | None,
        devices: Sequence[int],
        read: Read[T],
        need: int,
    ) -> tuple[dict[int, T], dict[int, str]]:
        """The devices' valid replies, and the reasons for the missing ones. With fewer than `need` valid, the
        missing devices are asked again, after waiting for their nodes."""
        light = question is not None and question.light
        tensors = requests.pack_broadcast(
            replace(broadcast, weights={}, extra={}, mask={}) if light else broadcast
        )
        good: dict[int, T] = {}
        bad: dict[int, str] = {}
        for attempt in range(TRIES):
            missing = [device for device in devices if device not in good]
            wait = self._config.run.timeout if attempt else 0.0
            self._membership.find(missing, need - len(good) if attempt else len(missing), wait)
            waiting: dict[str, int] = {}
            bad = {}
            for device in missing:
                member = self._membership.members.get(device)
                if member is None:
                    bad[device] = "it has no node"
                    continue
                content = self._message(device, member, broadcast, question, tensors)
                if sent := self._transport.send(content, member.node, kind, self._config.run.timeout):
                    waiting[sent] = device
                else:
                    bad[device] = "no message to its node was accepted"
            for device, reply in self._transport.replies(waiting, self._config.run.timeout):
                value = reply if isinstance(reply, Refused) else read(reply, device)
                if isinstance(value, Refused):
                    bad[device] = value.reason
                else:
                    good[device] = value
                    if question is None:
                        self._membership.mark_shared(device)
                    if not light:
                        self._membership.mark_frozen(device, broadcast.architecture.frozen)
            late = f"it did not answer within {self._config.run.timeout:g} s"
            bad |= dict.fromkeys(waiting.values(), late)
            for device, reason in bad.items():
                self._membership.forget(device)
                self._say(f"round {broadcast.round}, device {device}: {reason}")
            if len(good) >= need:
                return good, bad
        raise FeddumapError(self._failure(question, broadcast.round, len(good), need, len(devices), bad))

    def _message(
        self,
        device: int,
        member: Member,
        broadcast: Broadcast,
        question: Question | None,
        tensors: requests.Packed,
    ) -> RecordDict:
        request = Request(
            self._token,
            device,
            broadcast.round,
            broadcast.lr,
            broadcast.architecture,
            self._config,
            self._holdings.dataset.classes,
            question,
        )
        wants = question is None and self._shared > 0 and member.own_data and not member.has_shared
        images = self._holdings.shared(device, self._shared) if wants else None
        light = question is not None and question.light
        frozen = None if light or member.frozen == request.architecture.frozen else request.architecture
        return requests.pack_request(request, tensors, images, constants_of(frozen) if frozen else None)

    def _failure(
        self, question: Question | None, number: int, good: int, need: int, asked: int, bad: dict[int, str]
    ) -> str:
        asking = f"asked {question.name!r}" if question else "asked to train"
        share = "" if question else f" (run.least_share = {self._config.run.least_share:g})"
        reasons = "; ".join(f"device {device}: {reason}" for device, reason in list(bad.items())[:SHOWN])
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        return (
            f"round {number}: {good} of {asked} devices replied as expected when {asking}, {need} were "
            f"needed{share}, in {TRIES} tries ({reasons}{more}): fix the nodes, then resume"
        )
