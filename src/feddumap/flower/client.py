"""What runs on a device: Flower's ClientApp around the same desk as in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from feddumap.core.messages import Broadcast
from feddumap.device.executor import Executor
from feddumap.device.state import FileStore
from feddumap.errors import FeddumapError
from feddumap.flower import handshake, replies, requests
from feddumap.flower.codec import Refused
from feddumap.flower.handshake import Hello
from feddumap.flower.node import Node, accept_gift, holdings_of
from feddumap.flower.requests import Order
from feddumap.methods import compose
from feddumap.system.determinism import deterministic

Work = Callable[[RecordDict, Node], RecordDict]
T = TypeVar("T")


def client_app(state: Path | None = None) -> ClientApp:
    """The app of every device. Which one it is, what it holds and what it allows is in its node's
    configuration:

    partition-id=K        the device's number, from 0
    data="PATH"           its own data: a folder of images, a Parquet or an .npz file; else device K's part of
                          the data set that the server names
    state="PATH"          where it keeps what it needs between rounds; else `state`, or feddumap's home
    allow-modules=true    the server may name code of this machine's to be run (`module:function`)
    """
    app = ClientApp()
    app.query("hello")(partial(_handle, hello, state))
    app.query()(partial(_handle, survey, state))
    app.train()(partial(_handle, train, state))
    return app


def _handle(work: Work, state: Path | None, message: Message, context: Context) -> Message:
    """Do the work; what the device cannot or will not do it says in its reply."""
    try:
        content = work(message.content, Node.read(context.node_config, state))
    except FeddumapError as error:
        content = replies.pack_refusal(str(error))
    return Message(content, reply_to=message)


def hello(content: RecordDict, node: Node) -> RecordDict:
    """Who this is."""
    token = _good(handshake.read_question_who(content))
    return handshake.pack_hello(Hello(node.device, node.data is not None, node.has_gift(token)))


def train(content: RecordDict, node: Node) -> RecordDict:
    """A round's training; what the device keeps of it stays in its folder."""
    order, broadcast = _read(content, node)
    gift = _good(requests.read_gift(content))
    if gift is not None:
        accept_gift(node, order.token, gift)
    drawer = FileStore(node.folder(order.token))
    desk = Executor(order.config, holdings_of(node, order), compose(order.config))
    with deterministic():
        upload, kept = desk.train(broadcast, node.device, drawer.recall(node.device, order.round))
    if kept:
        drawer.keep(node.device, order.round, kept)
        # the server may go back as far as the older one of its two checkpoints
        drawer.tidy(order.round - 2 * order.config.run.checkpoint_every)
    return replies.pack_upload(upload)


def survey(content: RecordDict, node: Node) -> RecordDict:
    """The answer to a question."""
    order, broadcast = _read(content, node)
    if order.question is None:
        raise FeddumapError("the message has no question")
    desk = Executor(order.config, holdings_of(node, order), compose(order.config))
    with deterministic():
        answer = desk.answer(order.question, broadcast, node.device)
    return replies.pack_answer(answer, order.round)


def _read(content: RecordDict, node: Node) -> tuple[Order, Broadcast]:
    """An order for this device that it may carry out, and only then its tensors."""
    order = _good(requests.read_order(content))
    if order.device != node.device:
        raise FeddumapError(f"this node is device {node.device}, not {order.device}")
    node.permit(order.config, order.architecture.family)
    return order, _good(requests.read_broadcast(content, order))


def _good(value: T | Refused) -> T:
    if isinstance(value, Refused):
        raise FeddumapError(f"the message cannot be used: {value.reason}")
    return value
