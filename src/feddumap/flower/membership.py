"""Which node is which device: nodes may disconnect and return under other ids, devices keep their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from feddumap.flower import handshake
from feddumap.flower.codec import Refused
from feddumap.flower.handshake import Hello
from feddumap.flower.transport import LONGEST_PAUSE, Transport

HELLO_TIMEOUT = 60.0  # seconds for a node's handshake; it may have to import torch first


@dataclass(frozen=True)
class Member:
    """The node of a device, and what its handshake said of it."""

    node: int
    own_data: bool
    has_shared: bool
    frozen: str


class Membership:
    """The devices whose nodes are known. A node is asked for its device when it first appears."""

    def __init__(
        self, transport: Transport, devices: int, token: str, timeout: float, say: Callable[[str], None]
    ) -> None:
        self._transport, self._devices, self._token, self._say = transport, devices, token, say
        self._timeout = min(HELLO_TIMEOUT, timeout)
        self._pending: dict[str, int] = {}
        self.members: dict[int, Member] = {}
        self.refused: dict[int, str] = {}
        """Nodes that cannot be a device, and why; they are not asked again while they stay connected."""

    def find(self, devices: Sequence[int], need: int, seconds: float) -> None:
        """Wait until `need` of these devices have nodes, or the time is over. With no time at all, handshakes
        under way are waited for, but not nodes that have yet to connect."""
        self._refresh()
        self._collect(devices, need, min(seconds, self._timeout) if seconds else self._timeout)
        for _ in self._transport.each(seconds):
            if self._known(devices) >= need:
                return
            self._refresh()
            self._collect(devices, need, LONGEST_PAUSE)

    def forget(self, device: int) -> None:
        """Ask the device's node again which device it is, because it did not reply as expected."""
        self.members.pop(device, None)

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

    def _refresh(self) -> None:
        """Drop nodes that disconnected, and send a handshake to new ones."""
        present = self._transport.nodes()
        self.members = {device: member for device, member in self.members.items() if member.node in present}
        self.refused = {node: reason for node, reason in self.refused.items() if node in present}
        self._pending = {sent: node for sent, node in self._pending.items() if node in present}
        known = {member.node for member in self.members.values()}
        known |= self.refused.keys() | set(self._pending.values())
        for node in sorted(present - known):
            if sent := self._send_hello(node):
                self._pending[sent] = node

    def _send_hello(self, node: int) -> str | None:
        content = handshake.pack_hello_request(self._token)
        return self._transport.send(content, node, "query.hello", self._timeout)

    def _collect(self, devices: Sequence[int], need: int, seconds: float) -> None:
        """Admit the nodes whose handshakes arrive; after a full timeout the others are asked anew later."""
        arrived: list[tuple[int, Hello]] = []

        def enough() -> bool:
            known = {hello.device for _, hello in arrived}
            return sum(device in self.members or device in known for device in devices) >= need

        for node, reply in self._transport.replies(self._pending, seconds, enough):
            if isinstance(reply, Refused):
                continue  # it is asked again as long as it is connected
            hello = handshake.read_hello(reply, self._devices)
            if isinstance(hello, Refused):
                self._refuse(node, f"it did not say which device it is: {hello.reason}")
            else:
                arrived.append((node, hello))
        for node, hello in sorted(arrived, key=lambda pair: pair[0]):
            self._admit(node, hello)
        if seconds >= self._timeout:
            self._pending.clear()

    def _admit(self, node: int, hello: Hello) -> None:
        """A device has one node: the present one, as long as that replies."""
        current = self.members.get(hello.device)
        if current is not None and current.node != node and self._replies(current.node, hello.device):
            self._refuse(node, f"it says it is device {hello.device}, which another node is already")
            return
        self.members[hello.device] = Member(node, hello.own_data, hello.has_shared, hello.frozen)

    def _replies(self, node: int, device: int) -> bool:
        """Whether a node still replies as this device."""
        sent = self._send_hello(node)
        for _, reply in self._transport.replies({sent: node} if sent else {}, self._timeout):
            hello = reply if isinstance(reply, Refused) else handshake.read_hello(reply, self._devices)
            return not isinstance(hello, Refused) and hello.device == device
        return False

    def _refuse(self, node: int, reason: str) -> None:
        self.refused[node] = reason
        self._say(f"node {node} is not used: {reason}")
