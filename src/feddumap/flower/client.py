"""The app of a device: Flower's ClientApp around the executor that simulations use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from feddumap.core.messages import Broadcast, Upload
from feddumap.device.executor import Executor
from feddumap.device.state import FileStore
from feddumap.errors import FeddumapError
from feddumap.flower import fields, handshake, replies, requests
from feddumap.flower.codec import Refused, RefusedError
from feddumap.flower.handshake import Hello
from feddumap.flower.node import Node, forget_refusal, holdings_of, keep_frozen, log_refusal, save_shared
from feddumap.flower.requests import Request
from feddumap.methods import compose
from feddumap.system.determinism import deterministic

APP_FAILED = 2  # Flower's code for an app's exception
SECURE = "secaggplus_configs"  # the record that Flower's messages of secure aggregation have
Work = Callable[[RecordDict, Node], RecordDict]
T = TypeVar("T")


def client_app(state: Path | None = None, modules: bool = False) -> ClientApp:
    """The app of every device. Its node's configuration says which device it is:

    partition-id=K        the device's number, from 0
    data="PATH"           its own data: a folder of images, a table or an .npz file; else device K's part of
                          the data set that the server names
    state="PATH"          the folder of its state between rounds; else `state`, or feddumap's home
    allow-modules=true    the server may name code on this machine to run (`module:function`); else `modules`
    """
    app = ClientApp()
    app.query("hello")(partial(_handle, hello, state, modules))
    app.query("refused")(partial(_handle, refused, state, modules))
    app.query()(partial(_handle, survey, state, modules))
    app.train()(partial(_handle, train, state, modules))
    return app


def _handle(work: Work, state: Path | None, modules: bool, message: Message, context: Context) -> Message:
    """Handle a message. An error becomes a reply with its reason, and a line in the node's log."""
    if SECURE in message.content:
        return _secure(partial(Node.read, context.node_config, state, modules), message, context)
    node = None
    try:
        node = Node.read(context.node_config, state, modules)
        content = work(message.content, node)
    except FeddumapError as error:
        log_refusal(node, _token(message.content), f"refused a request of the server: {error}")
        content = replies.pack_refusal(str(error))
    return Message(content, reply_to=message)


def _secure(node: Callable[[], Node], message: Message, context: Context) -> Message:
    """Handle a message of secure aggregation. After an error the others go on without this device."""
    from feddumap.flower import secagg  # Flower's parts for it take long to import

    try:
        return secagg.masked_reply(message, context, partial(_trained, node=node()))
    except FeddumapError as error:
        return Message(Error(APP_FAILED, str(error)), reply_to=message)


def refused(content: RecordDict, node: Node) -> RecordDict:
    """The server does not use this node."""
    token, reason = _valid(handshake.read_refused(content))
    log_refusal(node, token, f"the server does not use this node: {reason}")
    return RecordDict()


def hello(content: RecordDict, node: Node) -> RecordDict:
    """The reply to a handshake."""
    token = _valid(handshake.read_hello_request(content))
    own, shared = node.data is not None, node.has_shared(token)
    return handshake.pack_hello(Hello(node.device, own, shared, node.frozen(token)))


def train(content: RecordDict, node: Node) -> RecordDict:
    """Train for a round."""
    upload, _, _ = _trained(content, node)
    return replies.pack_upload(upload)


def _trained(content: RecordDict, node: Node) -> tuple[Upload, Broadcast, Request]:
    """Train for a round. The device's state stays in its folder."""
    request, broadcast = _read(content, node)
    shared = _valid(requests.read_shared(content, request.architecture.input, request.architecture.classes))
    if shared is not None:
        save_shared(node, request.token, shared)
    store = FileStore(node.folder(request.token))
    store.clean()
    executor = Executor(request.config, holdings_of(node, request), compose(request.config))
    with deterministic():
        upload, kept = executor.train(broadcast, node.device, store.recall(node.device, request.round))
    if kept:
        store.keep(node.device, request.round, kept)
        # the server may go back as far as the older one of its two checkpoints
        store.tidy(request.round - 2 * request.config.run.checkpoint_every)
    forget_refusal(node, request.token)
    return upload, broadcast, request


def survey(content: RecordDict, node: Node) -> RecordDict:
    """Answer a question."""
    request, broadcast = _read(content, node)
    if request.question is None:
        raise FeddumapError("the message has no question")
    executor = Executor(request.config, holdings_of(node, request), compose(request.config))
    with deterministic():
        answer = executor.answer(request.question, broadcast, node.device)
    return replies.pack_answer(answer, request.round)


def _read(content: RecordDict, node: Node) -> tuple[Request, Broadcast]:
    """A request for this device that its owner allows; only then its tensors are read."""
    request = _valid(requests.read_request(content))
    if request.device != node.device:
        raise FeddumapError(f"this node is device {node.device}, not {request.device}")
    node.permit(request.config, request.architecture.family)
    if request.question is None or not request.question.light:
        frozen = _valid(requests.read_frozen(content, request.architecture))
        keep_frozen(node, request.token, request.architecture, frozen)
    return request, _valid(requests.read_broadcast(content, request))


def _token(content: RecordDict) -> str | None:
    """The token of the run that a message belongs to, if it has one."""
    key = "order" if "order" in content else "who"
    try:
        return fields.token(fields.record_of(content, key))
    except RefusedError:
        return None


def _valid(value: T | Refused) -> T:
    if isinstance(value, Refused):
        raise FeddumapError(f"invalid message: {value.reason}")
    return value
