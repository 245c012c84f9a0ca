"""The handshake: the server asks a node which device it is."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from feddumap.flower import fields
from feddumap.flower.codec import reader
from feddumap.flower.replies import refuse_refusals


@dataclass(frozen=True)
class Hello:
    """A node's reply: its device, whether that trains on data of its own rather than a part of the data set,
    whether it has the images that the server shares, and the hash of the frozen tensors that it has."""

    device: int
    own_data: bool
    has_shared: bool
    frozen: str = ""


def pack_hello_request(token: str) -> RecordDict:
    return RecordDict({"who": ConfigRecord({"token": token})})


@reader
def read_hello_request(content: RecordDict) -> str:
    """The token of the run whose server asks."""
    return fields.token(fields.record_of(content, "who"))


def pack_hello(hello: Hello) -> RecordDict:
    own, shared = hello.own_data, hello.has_shared
    record = ConfigRecord({"device": hello.device, "own": own, "gift": shared, "frozen": hello.frozen})
    return RecordDict({"hello": record})


def pack_refused(token: str, reason: str) -> RecordDict:
    """Tells a node why the server of a run does not use it."""
    return RecordDict({"who": ConfigRecord({"token": token, "reason": reason})})


@reader
def read_refused(content: RecordDict) -> tuple[str, str]:
    """The token of the run, and the reason."""
    record = fields.record_of(content, "who")
    return fields.token(record), " ".join(fields.text(record, "reason").split())[:500]


@reader
def read_hello(content: RecordDict, devices: int) -> Hello:
    """A node's reply, in a federation of this many devices."""
    refuse_refusals(content)
    record = fields.record_of(content, "hello")
    device = fields.integer(record, "device", range(devices))
    frozen = fields.sha256(fields.text(record, "frozen"))
    return Hello(device, fields.flag(record, "own"), fields.flag(record, "gift"), frozen)
