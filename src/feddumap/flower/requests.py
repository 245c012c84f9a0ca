"""What the server says to a device: to train, or to answer a question.

Every reader returns what it read or, whatever the message was, a `Refused`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from feddumap.config import Config
from feddumap.core.messages import Architecture, Broadcast, Question
from feddumap.core.tensors import Form, Forms, all_finite, forms_of
from feddumap.flower import codec, fields
from feddumap.flower.codec import RefusedError, reader
from feddumap.flower.fields import DEVICES, ROUNDS
from feddumap.models import architecture, build
from feddumap.training.samples import Samples

MOST_CLASSES = 10_000

Packed = Mapping[str, ArrayRecord]
"""A broadcast's tensors, packed once for all devices."""


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
    return codec.pack(weights=broadcast.weights, extra=broadcast.extra, mask=broadcast.mask)


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
        content.update(codec.pack(gift={"images": gift.images, "labels": gift.labels}))
    return content


@reader
def read_order(content: RecordDict) -> Order:
    """The order in a message. No tensor is made and nothing named in it is imported."""
    header = fields.numbers_of(content, "order")
    classes = header.get("classes")
    if not isinstance(classes, list) or not 0 < len(classes) <= MOST_CLASSES:
        raise RefusedError(f"its classes are not 1 to {MOST_CLASSES} names")
    question = None
    if "question" in content:
        asked = fields.numbers_of(content, "question")
        question = Question(
            fields.text(asked, "name"), fields.mapping(asked, "settings"), fields.flag(asked, "light")
        )
    return Order(
        token=fields.token(header),
        device=fields.integer(header, "device", DEVICES),
        round=fields.integer(header, "round", ROUNDS),
        lr=fields.real(header, "lr"),
        architecture=_architecture(header, len(classes)),
        config=Config.parse(fields.mapping(header, "config")),
        classes=tuple(str(name) for name in classes),
        question=question,
    )


def _architecture(header: ConfigRecord, classes: int) -> Architecture:
    value = fields.mapping(header, "architecture")
    channels = value.get("channels")
    whole = value.keys() == {"family", "classes", "channels"} and isinstance(channels, dict)
    if not whole or not all(type(width) is int for width in dict(channels or {}).values()):
        raise RefusedError("its architecture is none")
    if value["classes"] != classes or not isinstance(value["family"], str):
        raise RefusedError(f"its architecture is not of {classes} classes")
    return Architecture.from_json(value)


@reader
def read_broadcast(content: RecordDict, order: Order) -> Broadcast:
    """The broadcast of a message, with weights of the architecture's form or, for a light question, none.
    This makes the network of its architecture, so whoever calls it has seen that the family may be used
    here."""
    light = order.question is not None and order.question.light
    weights_form = {} if light else weights_forms(order.architecture)
    weights = codec.unpack(content, "weights", codec.exactly(weights_form))
    extra = codec.unpack(content, "extra", codec.named_alike(weights_form))
    mask = codec.unpack(content, "mask", _masks(weights_form))
    if not (all_finite(weights) and all_finite(extra)):
        raise RefusedError("its weights are not finite")
    return Broadcast(order.round, order.architecture, weights, order.lr, extra=extra, mask=mask)


def weights_forms(shape: Architecture) -> Forms:
    """The forms of an architecture's weights; one that is wider than its family's full network is refused."""
    full = architecture(shape.family, shape.classes).widths
    if any(width > full.get(name, 0) for name, width in shape.channels):
        raise RefusedError(f"its architecture is wider than a {shape.family}")
    return forms_of(build(shape).state_dict())


def _masks(weights: Forms) -> Callable[[Forms], str | None]:
    def check(found: Forms) -> str | None:
        for name, form in found.items():
            if name not in weights or form != Form("bool", weights[name].shape):
                return f"are of another form ({name[:100]!r} is not a mask of weights)"
        return None

    return check


@reader
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

    tensors = codec.unpack(content, "gift", check)
    return Samples(tensors["images"], tensors["labels"])
