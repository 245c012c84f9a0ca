"""A grid in this process: nodes that run the real ClientApp, messages that go through Flower's own bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from feddumap.flower.client import client_app

Mischief = Callable[[Message, RecordDict], RecordDict | Error | None]
"""What becomes of a node's reply to a message: other content, an error, or nothing at all."""


@dataclass
class FakeNode:
    """A node and what is wrong with it. A node that is not `connected` is not on the grid's list. `key` is
    its public key, and `since` when it connected."""

    config: dict[str, bool | float | int | str]
    mischief: Mischief = lambda message, content: content
    connected: bool = True
    kinds: list[str] = field(default_factory=list)
    key: bytes = b""
    since: str = ""


class FakeGrid(Grid):
    """Replies are made when a message is pushed, and lie there until they are pulled."""

    def __init__(self, nodes: dict[int, FakeNode], app: ClientApp | None = None) -> None:
        self.nodes = nodes
        self.app = app or client_app()
        self._replies: dict[str, Message] = {}
        self._ids = itertools.count()
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    @staticmethod
    def of(devices: int, **config: bool | float | int | str) -> FakeGrid:
        """A node for each device, under ids that tell nothing."""
        return FakeGrid({1000 - 7 * k: FakeNode({"partition-id": k, **config}) for k in range(devices)})

    def node(self, device: int) -> FakeNode:
        return next(node for node in self.nodes.values() if node.config.get("partition-id") == device)

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: object, **kwargs: object) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, node in self.nodes.items() if node.connected]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(
                node_id=number,
                public_key=self.nodes[number].key,
                last_activated_at=self.nodes[number].since,
            )
            for number in self.get_node_ids()
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            node = self.nodes.get(message.metadata.dst_node_id)
            if node is None:
                ids.append("")
                continue
            message.metadata.__dict__["_message_id"] = sent = f"message-{next(self._ids)}"
            ids.append(sent)
            node.kinds.append(message.metadata.message_type)
            if not node.connected:
                continue
            received = over_the_wire(message)
            context = Context(1, message.metadata.dst_node_id, dict(node.config), RecordDict(), {})
            reply = self.app(received, context)
            content = node.mischief(message, reply.content)
            if isinstance(content, Error):
                self._replies[sent] = Message(content, reply_to=received)
            elif content is not None:
                self._replies[sent] = over_the_wire(Message(content, reply_to=received))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(sent) for sent in message_ids if sent in self._replies]


def over_the_wire(message: Message) -> Message:
    """The message as Flower takes it apart into bytes and puts it together again."""
    contents = {number: thing.deflate() for number, thing in get_all_nested_objects(message).items()}
    copy = cast(Message, inflate_object_from_contents(message.object_id, contents))
    copy.metadata.__dict__["_message_id"] = message.metadata.message_id
    return copy
