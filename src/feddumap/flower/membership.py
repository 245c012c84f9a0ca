"""Which node is which device: nodes may disconnect and return under other ids, devices keep their numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from feddumap.flower import handshake
from feddumap.flower.codec import Refused
from feddumap.flower.device_keys import DeviceKeys, fingerprint
from feddumap.flower.handshake import Hello
from feddumap.flower.transport import LONGEST_PAUSE, Connection, Transport
from feddumap.flower.waiting import Report

HELLO_TIMEOUT = 60.0  # seconds for a node's handshake; it may have to import torch first

NEVER = "it has no node: it never connected"
SILENT = "its node does not answer any more"
DISCONNECTED = "it has no node: its node disconnected"


@dataclass(frozen=True)
class Member:
    """The node of a device, and what its handshake said of it."""

    node: int
    own_data: bool
    has_shared: bool
    frozen: str


class Membership:
    """The devices whose nodes are known. A node is asked for its device when it first appears, and refused if
    `keys` has another device for its key."""

    def __init__(
        self,
        transport: Transport,
        devices: int,
        token: str,
        timeout: float,
        say: Callable[[str], None],
        keys: DeviceKeys | None = None,
    ) -> None:
        self._transport, self._devices, self._token, self._say = transport, devices, token, say
        self._keys = keys
        self._timeout = min(HELLO_TIMEOUT, timeout)
        self._pending: dict[str, int] = {}
        self._sent: dict[str, float] = {}  # when the handshakes under way began
        self._connected: dict[int, Connection] = {}
        self._absent: dict[int, str] = {}  # why devices that have no node have none, where more is known
        self._said: set[tuple[int, str]] = set()
        self.members: dict[int, Member] = {}
        self.refused: dict[int, tuple[str, str]] = {}
        """Nodes that cannot be a device, since when they are connected, and why; they are not asked again
        until they connect anew."""

    def find(self, devices: Sequence[int], need: int, seconds: float, settled: int | None = None) -> None:
        """Wait until `need` of these devices have nodes, or the time is over. With no time at all, handshakes
        under way are waited for, but not nodes that have yet to connect. With `settled`, so many are enough
        if no other has come for as long as a handshake may take."""
        self._refresh()
        self._collect(devices, need, min(seconds, self._timeout) if seconds else self._timeout)
        known, began = self._known(devices), time.monotonic()
        news, report = began, Report(began)
        for _ in self._transport.each(seconds):
            if self._known(devices) >= need:
                return
            now = time.monotonic()
            if self._known(devices) != known:
                known, news = self._known(devices), now
            if settled is not None and known >= settled and now - news >= self._timeout:
                return
            if text := report.text(self.missing(devices), self._unidentified(), now):
                self._say(text)
            self._refresh()
            self._collect(devices, need, LONGEST_PAUSE)

    def missing(self, devices: Sequence[int]) -> dict[int, str]:
        """Those of the devices that have no node, and why."""
        return {device: self.absence(device) for device in devices if device not in self.members}

    def absence(self, device: int) -> str:
        """Why a device has no node."""
        pending = set(self._pending.values()) if self._keys is not None else set()
        if any(self._device_by_key(node) == device for node in pending):
            return "its node has not answered yet"
        return self._absent.get(device, NEVER)

    def _unidentified(self) -> int:
        """How many connected nodes may be any device."""
        return len(set(self._pending.values())) if self._keys is None else 0

    def forget(self, device: int) -> None:
        """Ask the device's node again which device it is, because it did not reply as expected."""
        if self.members.pop(device, None) is not None:
            self._absent[device] = SILENT

    def mark_frozen(self, device: int, frozen: str) -> None:
        """Note that the device has the frozen tensors of this hash."""
        if device in self.members:
            self.members[device] = replace(self.members[device], frozen=frozen)

    def mark_shared(self, device: int) -> None:
        """Note that the device has the images that the server shares."""
        if device in self.members:
            self.members[device] = replace(self.members[device], has_shared=True)

    def _known(self, devices: Sequence[int]) -> int:
        return sum(device in self.members for device in devices)

    def _device_by_key(self, node: int) -> int | None:
        """The device that the node's key belongs to, if there is a table of keys."""
        if self._keys is None or node not in self._connected:
            return None
        return self._keys.device(self._connected[node].key)

    def _refresh(self) -> None:
        """Drop nodes that disconnected, and send a handshake to new ones."""
        self._connected = present = self._transport.nodes()
        gone = {device for device, member in self.members.items() if member.node not in present}
        for device in gone:
            del self.members[device]
            self._absent[device] = DISCONNECTED
        self.refused = {
            node: (since, reason)
            for node, (since, reason) in self.refused.items()
            if node in present and present[node].since == since
        }
        recent = time.monotonic() - self._timeout
        self._sent = {sent: began for sent, began in self._sent.items() if began > recent}
        self._pending = {
            sent: node for sent, node in self._pending.items() if node in present and sent in self._sent
        }
        known = {member.node for member in self.members.values()}
        known |= self.refused.keys() | set(self._pending.values())
        for node in sorted(present.keys() - known):
            if self._keys is not None and self._device_by_key(node) is None:
                key = fingerprint(present[node].key)
                self._refuse(node, f"its key {key} is not in {self._keys.path.name}", tell=True)
            elif sent := self._send_hello(node):
                self._pending[sent], self._sent[sent] = node, time.monotonic()

    def _send_hello(self, node: int) -> str | None:
        content = handshake.pack_hello_request(self._token)
        return self._transport.send(content, node, "query.hello", self._timeout)

    def _collect(self, devices: Sequence[int], need: int, seconds: float) -> None:
        """Admit the nodes whose handshakes arrive; the others are asked anew after a full timeout."""
        arrived: list[tuple[int, Hello]] = []

        def enough() -> bool:
            known = {hello.device for _, hello in arrived}
            return sum(device in self.members or device in known for device in devices) >= need

        for node, reply in self._transport.replies(self._pending, seconds, enough):
            if isinstance(reply, Refused):
                self._note(node, reply.reason)  # it is asked again as long as it is connected
                continue
            hello = handshake.read_hello(reply, self._devices)
            if isinstance(hello, Refused):
                own = "refusal" in reply  # the node knows
                self._refuse(node, f"it did not say which device it is: {hello.reason}", tell=not own)
            else:
                arrived.append((node, hello))
        for node, hello in sorted(arrived, key=lambda pair: pair[0]):
            self._admit(node, hello)

    def _admit(self, node: int, hello: Hello) -> None:
        """A device has one node: the one with its key or, without a table of keys, the present one, as long
        as that replies."""
        owner = self._device_by_key(node)
        if owner is not None and owner != hello.device:
            self._refuse(node, f"it says it is device {hello.device}, but its key is device {owner}'s", True)
            return
        current = self.members.get(hello.device)
        if current is not None and current.node != node and self._replies(current.node, hello.device):
            self._refuse(node, f"it says it is device {hello.device}, which another node is already", True)
            return
        self._absent.pop(hello.device, None)
        self.members[hello.device] = Member(node, hello.own_data, hello.has_shared, hello.frozen)

    def _replies(self, node: int, device: int) -> bool:
        """Whether a node still replies as this device."""
        sent = self._send_hello(node)
        for _, reply in self._transport.replies({sent: node} if sent else {}, self._timeout):
            hello = reply if isinstance(reply, Refused) else handshake.read_hello(reply, self._devices)
            return not isinstance(hello, Refused) and hello.device == device
        return False

    def _refuse(self, node: int, reason: str, tell: bool) -> None:
        """Do not use a node until it connects anew; with `tell` it gets a message that says why."""
        self.refused[node] = (self._connected[node].since if node in self._connected else "", reason)
        if self._note(node, reason) and tell:
            content = handshake.pack_refused(self._token, reason)
            self._transport.send(content, node, "query.refused", self._timeout)

    def _note(self, node: int, reason: str) -> bool:
        """Say why a node is not used, unless that was said before."""
        device = self._device_by_key(node)
        if device is not None:
            self._absent[device] = f"its node is not used: {reason}"
        if (node, reason) in self._said:
            return False
        self._said.add((node, reason))
        self._say(f"node {node} is not used: {reason}")
        return True
