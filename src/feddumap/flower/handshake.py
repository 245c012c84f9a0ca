"""How the server learns which device a node is."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from feddumap.flower import fields
from feddumap.flower.codec import reader
from feddumap.flower.replies import refuse_refusals


@dataclass(frozen=True)
class Hello:
    """Who a node says it is: a device that has data of its `own` or a part of the data set, and whether it
    `has_gift`, the images that the server shares."""

    device: int
    own: bool
    has_gift: bool


def pack_question_who(token: str) -> RecordDict:
    return RecordDict({"who": ConfigRecord({"token": token})})


@reader
def read_question_who(content: RecordDict) -> str:
    """The token of the run that asks."""
    return fields.token(fields.numbers_of(content, "who"))


def pack_hello(hello: Hello) -> RecordDict:
    record = ConfigRecord({"device": hello.device, "own": hello.own, "gift": hello.has_gift})
    return RecordDict({"hello": record})


@reader
def read_hello(content: RecordDict, devices: int) -> Hello:
    """Who a node is, out of so many devices."""
    refuse_refusals(content)
    record = fields.numbers_of(content, "hello")
    device = fields.integer(record, "device", range(devices))
    return Hello(device, fields.flag(record, "own"), fields.flag(record, "gift"))
