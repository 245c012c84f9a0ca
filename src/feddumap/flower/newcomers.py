"""Questions to devices that came after the others: nobody waits for their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import RecordDict

from feddumap.core.messages import Broadcast
from feddumap.flower.codec import Refused
from feddumap.flower.transport import Transport

NOT_ACCEPTED = "no message to its node was accepted"

T = TypeVar("T")
LateRead = Callable[[RecordDict, int, Broadcast], T | Refused]


@dataclass(frozen=True)
class Sent:
    """A message to a device: what it came with, and when its answer is too late."""

    device: int
    broadcast: Broadcast
    until: float


class Newcomers:
    """The messages whose answers have not arrived yet."""

    def __init__(self, transport: Transport, timeout: float) -> None:
        self._transport, self._timeout = transport, timeout
        self._sent: dict[str, Sent] = {}
        self._rejected: dict[int, str] = {}

    def asked(self, device: int) -> bool:
        """Whether the device has a message that it has not answered yet."""
        return any(each.device == device for each in self._sent.values())

    def add(self, sent: str | None, device: int, broadcast: Broadcast) -> None:
        """Note the id of a message to a device, or that it was not accepted."""
        if sent is None:
            self._rejected[device] = NOT_ACCEPTED
        else:
            self._sent[sent] = Sent(device, broadcast, time.monotonic() + self._timeout)

    def drop(self, devices: Collection[int]) -> None:
        """Expect no answer of devices whose nodes are gone."""
        self._sent = {sent: each for sent, each in self._sent.items() if each.device not in devices}

    def collect(self, read: LateRead[T]) -> tuple[dict[int, T], dict[int, str]]:
        """The answers that have arrived, and what is wrong with the others that were due."""
        good: dict[int, T] = {}
        bad, self._rejected = self._rejected, {}
        for each, reply in self._transport.replies(self._sent, 0.0):
            value = reply if isinstance(reply, Refused) else read(reply, each.device, each.broadcast)
            if isinstance(value, Refused):
                bad[each.device] = value.reason
            else:
                good[each.device] = value
        for sent, each in list(self._sent.items()):
            if time.monotonic() > each.until:
                del self._sent[sent]
                bad[each.device] = f"it did not answer within {self._timeout:g} s"
        return good, bad
