"""What server and devices say to each other: broadcasts, uploads, questions and answers as Flower's records.

Every reader returns what it read or, whatever the message was, a `Refused`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from feddumap.config import Config
from feddumap.device.training import Samples
from feddumap.errors import FeddumapError
from feddumap.flower import wire
from feddumap.flower.answers import MOST_SAMPLES, forms_fault, values_fault
from feddumap.flower.wire import Form, Forms, Refused, RefusedError
from feddumap.models import architecture, build
from feddumap.tensors import all_finite
from feddumap.types import Answer, Architecture, Broadcast, Question, Upload

DEVICES, ROUNDS = range(2**31), range(2**31)
MOST_CLASSES = 10_000
TOKEN = re.compile(r"[0-9a-f]{32}")

Packed = Mapping[str, ArrayRecord]
"""A broadcast's tensors, packed once for all devices."""

P = ParamSpec("P")
T = TypeVar("T")


def _reader(read: Callable[P, T]) -> Callable[P, T | Refused]:
    """A reader that returns what it refuses."""

    @wraps(read)
    def returning(*args: P.args, **kwargs: P.kwargs) -> T | Refused:
        try:
            return read(*args, **kwargs)
        except (RefusedError, FeddumapError) as error:
            return Refused(str(error))

    return returning


# from the server to a device


@dataclass(frozen=True)
class Order:
    """What a message to a device says, its tensors aside."""

    token: str
    device: int
    round: int
    lr: float
    architecture: Architecture
    config: Config
    classes: tuple[str, ...]
    question: Question | None


def pack_broadcast(broadcast: Broadcast) -> Packed:
    return {
        "weights": wire.pack(broadcast.weights),
        "extra": wire.pack(broadcast.extra),
        "mask": wire.pack(broadcast.mask),
    }


def pack_order(order: Order, tensors: Packed, gift: Samples | None = None) -> RecordDict:
    """A message for one device; `gift` are images that the server shares with it."""
    header = ConfigRecord(
        {
            "token": order.token,
            "device": order.device,
            "round": order.round,
            "lr": float(order.lr),
            "architecture": json.dumps(order.architecture.to_json()),
            "config": order.config.model_dump_json(),
            "classes": list(order.classes),
        }
    )
    content = RecordDict({"order": header, **tensors})
    if order.question is not None:
        settings = json.dumps(dict(order.question.settings), allow_nan=False)
        content["question"] = ConfigRecord(
            {"name": order.question.name, "settings": settings, "light": order.question.light}
        )
    if gift is not None:
        content["gift"] = wire.pack({"images": gift.images, "labels": gift.labels})
    return content


@_reader
def read_order(content: RecordDict) -> Order:
    """The order in a message. No tensor is made and nothing named in it is imported."""
    header = wire.numbers_of(content, "order")
    classes = header.get("classes")
    if not isinstance(classes, list) or not 0 < len(classes) <= MOST_CLASSES:
        raise RefusedError(f"its classes are not 1 to {MOST_CLASSES} names")
    question = None
    if "question" in content:
        asked = wire.numbers_of(content, "question")
        question = Question(
            wire.text(asked, "name"), wire.mapping(asked, "settings"), wire.flag(asked, "light")
        )
    return Order(
        token=_token(header),
        device=wire.integer(header, "device", DEVICES),
        round=wire.integer(header, "round", ROUNDS),
        lr=wire.real(header, "lr"),
        architecture=_architecture(header, len(classes)),
        config=Config.parse(wire.mapping(header, "config")),
        classes=tuple(str(name) for name in classes),
        question=question,
    )


def _token(record: ConfigRecord) -> str:
    token = wire.text(record, "token")
    if not TOKEN.fullmatch(token):  # it becomes the name of a folder
        raise RefusedError("its token is not 32 hexadecimal digits")
    return token


def _architecture(header: ConfigRecord, classes: int) -> Architecture:
    value = wire.mapping(header, "architecture")
    channels = value.get("channels")
    whole = value.keys() == {"family", "classes", "channels"} and isinstance(channels, dict)
    if not whole or not all(type(width) is int for width in dict(channels or {}).values()):
        raise RefusedError("its architecture is none")
    if value["classes"] != classes or not isinstance(value["family"], str):
        raise RefusedError(f"its architecture is not of {classes} classes")
    return Architecture.from_json(value)


@_reader
def read_broadcast(content: RecordDict, order: Order) -> Broadcast:
    """The broadcast of a message, with weights of the architecture's form or, for a light question, none.
    This makes the network of its architecture, so whoever calls it has seen that the family may be used
    here."""
    light = order.question is not None and order.question.light
    weights_form = {} if light else weights_forms(order.architecture)
    weights = wire.unpack(content, "weights", wire.exactly(weights_form))
    extra = wire.unpack(content, "extra", wire.named_alike(weights_form))
    mask = wire.unpack(content, "mask", _masks(weights_form))
    if not (all_finite(weights) and all_finite(extra)):
        raise RefusedError("its weights are not finite")
    return Broadcast(order.round, order.architecture, weights, order.lr, extra=extra, mask=mask)


def weights_forms(shape: Architecture) -> Forms:
    """The forms of an architecture's weights; one that is wider than its family's full network is refused."""
    full = architecture(shape.family, shape.classes).widths
    if any(width > full.get(name, 0) for name, width in shape.channels):
        raise RefusedError(f"its architecture is wider than a {shape.family}")
    return wire.forms_of(build(shape).state_dict())


def _masks(weights: Forms) -> Callable[[Forms], str | None]:
    def check(found: Forms) -> str | None:
        for name, form in found.items():
            if name not in weights or form != Form("bool", weights[name].shape):
                return f"are of another form ({name[:100]!r} is not a mask of weights)"
        return None

    return check


@_reader
def read_gift(content: RecordDict) -> Samples | None:
    """The images that the server shares, if there are any in the message."""
    if "gift" not in content:
        return None

    def check(found: Forms) -> str | None:
        images, labels = found.get("images"), found.get("labels")
        if found.keys() != {"images", "labels"} or labels is None or len(labels.shape) != 1:
            return "are not images and labels"
        fits = images == Form("uint8", (*labels.shape, 32, 32, 3)) and labels.dtype == "int64"
        return None if fits else "are not images of 32 by 32 pixels with a label each"

    tensors = wire.unpack(content, "gift", check)
    return Samples(tensors["images"], tensors["labels"])


# from a device to the server


def pack_upload(upload: Upload) -> RecordDict:
    numbers = ConfigRecord(
        {
            "device": upload.device,
            "round": upload.round,
            "samples": upload.samples,
            "steps": upload.steps,
            "metrics": json.dumps(dict(upload.metrics)),
        }
    )
    return RecordDict(
        {"upload": numbers, "weights": wire.pack(upload.weights), "extra": wire.pack(upload.extra)}
    )


@_reader
def read_upload(content: RecordDict, broadcast: Broadcast, device: int, most: int = MOST_SAMPLES) -> Upload:
    """A device's upload: its own, of this round, of the broadcast's form, finite, and of `most` samples."""
    _refuse_refusals(content)
    numbers = wire.numbers_of(content, "upload")
    _expect(numbers, device, broadcast.round)
    samples = wire.integer(numbers, "samples", range(1, most + 1))
    steps = wire.integer(numbers, "steps", range(2**40))
    metrics = wire.mapping(numbers, "metrics")
    if not all(type(value) in (int, float) for value in metrics.values()):
        raise RefusedError("its metrics are not numbers")
    form = wire.forms_of(broadcast.weights)
    weights = wire.unpack(content, "weights", wire.exactly(form))
    extra = wire.unpack(content, "extra", wire.named_alike(form))
    if not (all_finite(weights) and all_finite(extra)):
        raise RefusedError("its model diverged (NaN or infinite)")
    return Upload(device, broadcast.round, samples, steps, weights, extra, metrics, finite=True)


def pack_answer(answer: Answer, number: int) -> RecordDict:
    """An answer to a question that was asked in round `number`."""
    values = json.dumps(dict(answer.values), allow_nan=False)
    numbers = ConfigRecord({"device": answer.device, "round": number, "values": values})
    return RecordDict({"answer": numbers, "tensors": wire.pack(answer.tensors)})


@_reader
def read_answer(content: RecordDict, question: Question, broadcast: Broadcast, device: int) -> Answer:
    """A device's answer to this question, as the question wants it."""
    _refuse_refusals(content)
    numbers = wire.numbers_of(content, "answer")
    _expect(numbers, device, broadcast.round)
    values = wire.mapping(numbers, "values")
    if problem := values_fault(question, broadcast.architecture.classes, values):
        raise RefusedError(f"it {problem}")
    tensors = wire.unpack(content, "tensors", forms_fault(question, broadcast))
    if not all_finite(tensors):
        raise RefusedError("its answer is not finite")
    return Answer(device, values, tensors)


def _expect(numbers: ConfigRecord, device: int, number: int) -> None:
    found = wire.integer(numbers, "device", DEVICES)
    if found != device:
        raise RefusedError(f"it is of device {found}")
    stale = wire.integer(numbers, "round", ROUNDS)
    if stale != number:
        raise RefusedError(f"it is of round {stale}, not of round {number}")


def pack_refusal(reason: str) -> RecordDict:
    """A device's reason for not doing what it was asked."""
    return RecordDict({"refusal": ConfigRecord({"reason": reason})})


def _refuse_refusals(content: RecordDict) -> None:
    if "refusal" in content:
        reason = wire.text(wire.numbers_of(content, "refusal"), "reason")
        raise RefusedError(f"it refused: {' '.join(reason.split())[:500]}")


# getting to know each other


@dataclass(frozen=True)
class Hello:
    """Who a node says it is: a device that has data of its `own` or a part of the data set, and whether it
    `has_gift`, the images that the server shares."""

    device: int
    own: bool
    has_gift: bool


def pack_question_who(token: str) -> RecordDict:
    return RecordDict({"who": ConfigRecord({"token": token})})


@_reader
def read_question_who(content: RecordDict) -> str:
    """The token of the run that asks."""
    return _token(wire.numbers_of(content, "who"))


def pack_hello(hello: Hello) -> RecordDict:
    record = ConfigRecord({"device": hello.device, "own": hello.own, "gift": hello.has_gift})
    return RecordDict({"hello": record})


@_reader
def read_hello(content: RecordDict, devices: int) -> Hello:
    """Who a node is, out of so many devices."""
    _refuse_refusals(content)
    record = wire.numbers_of(content, "hello")
    device = wire.integer(record, "device", range(devices))
    return Hello(device, wire.flag(record, "own"), wire.flag(record, "gift"))
