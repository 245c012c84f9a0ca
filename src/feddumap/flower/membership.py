"""Which node is which device. Nodes come, go and come back under other ids; devices keep their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from feddumap.flower import handshake
from feddumap.flower.codec import Refused
from feddumap.flower.handshake import Hello
from feddumap.flower.transport import LONGEST_PAUSE, Transport

PATIENCE = 60.0  # seconds that a node has to say who it is; it may have to import torch first


@dataclass(frozen=True)
class Seat:
    """The node of a device."""

    node: int
    own: bool
    has_gift: bool


class Membership:
    """The devices whose nodes are known. A node is asked who it is when it first appears."""

    def __init__(
        self, post: Transport, devices: int, token: str, patience: float, say: Callable[[str], None]
    ) -> None:
        self._post, self._devices, self._token, self._say = post, devices, token, say
        self._patience = min(PATIENCE, patience)
        self._asked: dict[str, int] = {}
        self.seats: dict[int, Seat] = {}
        self.refused: dict[int, str] = {}
        """Nodes that cannot be a device, and why; they are not asked again while they stay connected."""

    def find(self, devices: Sequence[int], need: int, seconds: float) -> None:
        """Have nodes for `need` of these devices if that can be within the time. Without any time nodes that
        have just appeared are waited for, but not those that may yet appear."""
        self._look()
        self._hear(devices, need, min(seconds, self._patience) if seconds else self._patience)
        for _ in self._post.each(seconds):
            if self._found(devices) >= need:
                return
            self._look()
            self._hear(devices, need, LONGEST_PAUSE)

    def forget(self, device: int) -> None:
        """Its node will be asked again who it is: it did not do what was expected of that device."""
        self.seats.pop(device, None)

    def gave(self, device: int) -> None:
        """It has the images that the server shares."""
        if device in self.seats:
            self.seats[device] = replace(self.seats[device], has_gift=True)

    def _found(self, devices: Sequence[int]) -> int:
        return sum(device in self.seats for device in devices)

    def _look(self) -> None:
        """Notice who left, and ask those who came."""
        present = self._post.nodes()
        self.seats = {device: seat for device, seat in self.seats.items() if seat.node in present}
        self.refused = {node: reason for node, reason in self.refused.items() if node in present}
        self._asked = {sent: node for sent, node in self._asked.items() if node in present}
        known = {seat.node for seat in self.seats.values()} | self.refused.keys() | set(self._asked.values())
        for node in sorted(present - known):
            if sent := self._ask(node):
                self._asked[sent] = node

    def _ask(self, node: int) -> str | None:
        content = handshake.pack_question_who(self._token)
        return self._post.send(content, node, "query.hello", self._patience)

    def _hear(self, devices: Sequence[int], need: int, seconds: float) -> None:
        """Seat the nodes that have said who they are; whoever has not by now is asked anew later."""
        came: list[tuple[int, Hello]] = []

        def enough() -> bool:
            known = {hello.device for _, hello in came}
            return sum(device in self.seats or device in known for device in devices) >= need

        for node, reply in self._post.replies(self._asked, seconds, enough):
            if isinstance(reply, Refused):
                continue  # it is asked again as long as it is connected
            hello = handshake.read_hello(reply, self._devices)
            if isinstance(hello, Refused):
                self._refuse(node, f"it did not say which device it is: {hello.reason}")
            else:
                came.append((node, hello))
        for node, hello in sorted(came, key=lambda pair: pair[0]):
            self._seat(node, hello)
        if seconds >= self._patience:
            self._asked.clear()

    def _seat(self, node: int, hello: Hello) -> None:
        """A device has one node: the one it has, as long as that answers."""
        held = self.seats.get(hello.device)
        if held is not None and held.node != node and self._answers(held.node, hello.device):
            self._refuse(node, f"it says it is device {hello.device}, which another node is already")
            return
        self.seats[hello.device] = Seat(node, hello.own, hello.has_gift)

    def _answers(self, node: int, device: int) -> bool:
        sent = self._ask(node)
        for _, reply in self._post.replies({sent: node} if sent else {}, self._patience):
            hello = reply if isinstance(reply, Refused) else handshake.read_hello(reply, self._devices)
            return not isinstance(hello, Refused) and hello.device == device
        return False

    def _refuse(self, node: int, reason: str) -> None:
        self.refused[node] = reason
        self._say(f"node {node} is not used: {reason}")
