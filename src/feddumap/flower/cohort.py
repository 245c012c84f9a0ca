"""A cohort of devices behind Flower's nodes. No device can block or spoil a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import TypeVar

from flwr.app import RecordDict
from flwr.serverapp import Grid

from feddumap.config import Config
from feddumap.core.messages import Answer, Broadcast, MissingUpload, Question, ServerState, Upload
from feddumap.device.holdings import SplitHoldings
from feddumap.engine.local import Evaluator
from feddumap.errors import FeddumapError
from feddumap.flower import replies, requests
from feddumap.flower.claims import Claims
from feddumap.flower.codec import Refused
from feddumap.flower.device_keys import DeviceKeys
from feddumap.flower.membership import Member, Membership
from feddumap.flower.newcomers import NOT_ACCEPTED, LateRead, Newcomers
from feddumap.flower.requests import Request
from feddumap.flower.transport import Transport
from feddumap.flower.waiting import listed
from feddumap.models.frozen import constants_of
from feddumap.training.evaluation import Score

TRIES = 3
SHOWN = 3  # reasons in an error

T = TypeVar("T")
Read = Callable[[RecordDict, int], T | Refused]


class FlowerCohort:
    """Devices are identified by their numbers, which their nodes report, and by their keys if `keys` has a
    table of them. `holdings` are the server's; devices with data of their own get up to `shared` images of
    them each."""

    def __init__(
        self,
        grid: Grid,
        config: Config,
        token: str,
        holdings: SplitHoldings,
        shared: int,
        say: Callable[[str], None] = lambda _: None,
        close: Callable[[], None] = lambda: None,
        keys: DeviceKeys | None = None,
    ) -> None:
        self._config, self._token, self._say = config, token, say
        self._holdings, self._shared = holdings, shared
        self.close = close
        self._evaluator = Evaluator.of(holdings.dataset, holdings.split, config)
        self._grid = grid
        self._transport = Transport(grid)
        self._membership = Membership(
            self._transport, config.data.devices, token, config.run.timeout, say, keys
        )
        self._claims = Claims(holdings, config.run.most_samples)
        self._samples: dict[int, int] = {}  # the samples that each device reported
        self._problems: dict[int, str] = {}  # what was last said of each device
        self._newcomers = Newcomers(self._transport, config.run.timeout)

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload | MissingUpload]:
        """Uploads in the order of `devices`, with a `MissingUpload` for each device without a valid one; an
        error if too few are valid."""

        def read(content: RecordDict, device: int) -> Upload | Refused:
            most = self._samples[device] + min(self._shared, len(self._holdings.split.server))
            return replies.read_upload(content, broadcast, device, most)

        uploads, reasons = self._ask("train", broadcast, None, devices, read, self._least(devices))
        for device in devices:
            yield uploads.pop(device) if device in uploads else MissingUpload(device, reasons[device])

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        """Answers in the order of `devices`, from all of them; a partial or optional question may lack
        some."""
        census = question.name == "census"

        def read(content: RecordDict, device: int, message: Broadcast = broadcast) -> Answer | Refused:
            answer = replies.read_answer(content, question, message, device)
            if census and not isinstance(answer, Refused):
                member = self._membership.members.get(device)
                own = member is not None and member.own_data
                if problem := self._claims.fault(device, own, answer.values):
                    return Refused(f"it {problem}")
            return answer

        if question.optional:
            answers, reasons = self._ask_newcomers(question, broadcast, devices, read)
        else:
            asked = devices if census else [device for device in devices if device in self._samples]
            need = self._least(asked) if question.partial else len(devices)
            answers, reasons = self._ask("query", broadcast, question, devices, read, need)
        if census:
            self._samples |= {device: answer.values["samples"] for device, answer in answers.items()}
            self._say_joined(question, answers, reasons)
        return (
            answers[device] if device in answers else Answer(device, lost=reasons[device])
            for device in devices
        )

    def _say_joined(self, question: Question, answers: Sized, reasons: Mapping[int, str]) -> None:
        if question.optional and answers:
            self._say(f"joined late: {len(answers)} of {len(answers) + len(reasons)} missing devices")
        elif reasons and not question.optional:
            self._say(
                f"training with {len(answers)} of {len(answers) + len(reasons)} devices ({listed(reasons)}); "
                "the others join when they are there"
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
        census = question is not None and question.name == "census"
        for attempt in range(TRIES):
            missing = [device for device in devices if device not in good]
            self._find(missing, need - len(good), attempt, census)
            waiting: dict[str, int] = {}
            bad = self._membership.missing(missing)
            unsaid = set(bad) if census else set()  # they are named together
            for device in missing:
                if device in bad:
                    continue
                if not census and device not in self._samples:
                    bad[device] = "it has not joined yet"
                elif sent := self._send(kind, device, broadcast, question, tensors):
                    waiting[sent] = device
                else:
                    bad[device] = NOT_ACCEPTED
            for device, reply in self._transport.replies(waiting, self._config.run.timeout):
                value = reply if isinstance(reply, Refused) else read(reply, device)
                if isinstance(value, Refused):
                    bad[device] = value.reason
                else:
                    good[device] = value
                    self._problems.pop(device, None)
                    if question is None:
                        self._membership.mark_shared(device)
                    if not light:
                        self._membership.mark_frozen(device, broadcast.architecture.frozen)
            bad |= dict.fromkeys(waiting.values(), self._late)
            for device, reason in bad.items():
                self._membership.forget(device)
                if device not in unsaid:
                    self._complain(broadcast.round, device, reason)
            if len(good) >= need:
                return good, bad
        raise FeddumapError(self._failure(question, broadcast.round, len(good), need, len(devices), bad))

    def _ask_newcomers(
        self, question: Question, broadcast: Broadcast, devices: Sequence[int], read: LateRead[T]
    ) -> tuple[dict[int, T], dict[int, str]]:
        """Ask devices without waiting for anything: answers that are not there at once are collected the next
        time. The question must be a light one."""
        self._membership.find(devices, 0, 0.0)
        absent = self._membership.missing(devices)
        tensors = requests.pack_broadcast(replace(broadcast, weights={}, extra={}, mask={}))
        self._newcomers.drop(absent)
        for device in devices:
            if device not in absent and not self._newcomers.asked(device):
                sent = self._send("query", device, broadcast, question, tensors)
                self._newcomers.add(sent, device, broadcast)
        good, bad = self._newcomers.collect(read)
        for device, reason in bad.items():
            self._membership.forget(device)
            self._complain(broadcast.round, device, reason)
        pending = {device: "it has not answered yet" for device in devices if self._newcomers.asked(device)}
        return good, {**absent, **pending, **bad}

    @property
    def _late(self) -> str:
        return f"it did not answer within {self._config.run.timeout:g} s"

    def _complain(self, number: int, device: int, reason: str) -> None:
        """Say what is wrong with a device, unless that is what was said last."""
        if self._problems.get(device) != reason:
            self._say(f"round {number}, device {device}: {reason}")
            self._problems[device] = reason

    def _find(self, devices: Sequence[int], need: int, attempt: int, census: bool) -> None:
        """Wait for the nodes of devices: not at all at first, except for the census, which waits for all of
        them as long as they keep coming."""
        timeout = self._config.run.timeout
        if attempt:
            self._membership.find(devices, need, timeout)
        elif census:
            self._membership.find(devices, len(devices), timeout, settled=need)
        else:
            self._membership.find(devices, len(devices), 0.0)

    def _send(
        self,
        kind: str,
        device: int,
        broadcast: Broadcast,
        question: Question | None,
        tensors: requests.Packed,
    ) -> str | None:
        """Send a request to the device's node; returns the message's id, or None if it was not accepted."""
        member = self._membership.members[device]
        content = self._message(device, member, broadcast, question, tensors)
        return self._transport.send(content, member.node, kind, self._config.run.timeout)

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
        partial = question is None or question.partial
        share = f"run.least_share = {self._config.run.least_share:g}" if partial else "all that were asked"
        reasons = "; ".join(f"device {device}: {reason}" for device, reason in list(bad.items())[:SHOWN])
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        return (
            f"round {number}: {good} of {asked} devices replied as expected when {asking}, {need} were "
            f"needed ({share}), in {TRIES} tries ({reasons}{more}): fix the nodes, then resume"
        )
