"""Requests of the server to a device: to train, or to answer a question.

A reader returns what it read or, for any invalid message, a `Refused`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from feddumap.config import Config
from feddumap.core.messages import Architecture, Broadcast, InputSpec, Question, Tensors
from feddumap.core.tensors import Form, Forms, all_finite, digest, forms_of
from feddumap.flower import codec, fields
from feddumap.flower.codec import RefusedError, reader
from feddumap.flower.fields import DEVICES, ROUNDS
from feddumap.models import build, frozen_names, layer_widths, state_of, unpruned
from feddumap.training.samples import Samples

MOST_CLASSES = 10_000
LARGEST_INPUT = 1 << 26  # bytes of a sample

Packed = Mapping[str, ArrayRecord]
"""The tensors of a broadcast, packed once for all devices."""


@dataclass(frozen=True)
class Request:
    """A message to a device, without its tensors."""

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


def pack_request(
    request: Request, tensors: Packed, shared: Samples | None = None, frozen: Tensors | None = None
) -> RecordDict:
    """A message for one device; `shared` are images that the server shares with it, `frozen` the parameters
    that are not trained."""
    header = ConfigRecord(
        {
            "token": request.token,
            "device": request.device,
            "round": request.round,
            "lr": float(request.lr),
            "architecture": json.dumps(request.architecture.to_json()),
            "config": request.config.model_dump_json(),
            "classes": list(request.classes),
        }
    )
    content = RecordDict({"order": header, **tensors})
    if request.question is not None:
        settings = json.dumps(dict(request.question.settings), allow_nan=False)
        content["question"] = ConfigRecord(
            {"name": request.question.name, "settings": settings, "light": request.question.light}
        )
    if shared is not None:
        content.update(codec.pack(gift={"inputs": shared.inputs, "labels": shared.targets}))
    if frozen:
        content.update(codec.pack(frozen=frozen))
    return content


@reader
def read_request(content: RecordDict) -> Request:
    """The request in a message. Makes no tensor, and imports nothing that the message names."""
    header = fields.record_of(content, "order")
    classes = header.get("classes")
    if not isinstance(classes, list) or not 0 < len(classes) <= MOST_CLASSES:
        raise RefusedError(f"its classes are not 1 to {MOST_CLASSES} names")
    question = None
    if "question" in content:
        asked = fields.record_of(content, "question")
        question = Question(
            fields.text(asked, "name"), fields.mapping(asked, "settings"), fields.flag(asked, "light")
        )
    return Request(
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
    known = {"family", "classes", "channels", "input", "settings"}
    whole = known <= value.keys() <= known | {"frozen"} and isinstance(channels, dict)
    if not whole or not all(type(width) is int for width in dict(channels or {}).values()):
        raise RefusedError("its architecture is none")
    if value["classes"] != classes or not isinstance(value["family"], str):
        raise RefusedError(f"its architecture is not of {classes} classes")
    try:
        made = Architecture.from_json(value)
    except (ValueError, TypeError, AttributeError):
        raise RefusedError("its architecture has no valid input") from None
    fields.sha256(made.frozen)
    if made.input.nbytes > LARGEST_INPUT:
        raise RefusedError(f"its input has {made.input.nbytes} bytes, more than {LARGEST_INPUT}")
    return made


@reader
def read_broadcast(content: RecordDict, request: Request) -> Broadcast:
    """The broadcast of a message, with weights of the architecture's shapes or, for a light question, none.
    It builds the network of the architecture, so the caller must have checked that its family is allowed."""
    light = request.question is not None and request.question.light
    weights_form = {} if light else weights_forms(request.architecture)
    weights = codec.unpack(content, "weights", codec.exactly(weights_form))
    extra = codec.unpack(content, "extra", codec.named_alike(weights_form))
    mask = codec.unpack(content, "mask", _masks(weights_form))
    if not (all_finite(weights) and all_finite(extra)):
        raise RefusedError("its weights are not finite")
    return Broadcast(request.round, request.architecture, weights, request.lr, extra=extra, mask=mask)


def weights_forms(shape: Architecture) -> Forms:
    """The forms of an architecture's weights; refuses one wider than its family's full network."""
    forms = _forms(shape)
    return {name: form for name, form in forms.items() if not (shape.frozen and name in frozen_names(shape))}


@reader
def read_frozen(content: RecordDict, shape: Architecture) -> Tensors | None:
    """The frozen tensors of an architecture, if the message has any."""
    if "frozen" not in content:
        return None
    names = frozen_names(shape)
    expected = {name: form for name, form in _forms(shape).items() if name in names}
    tensors = codec.unpack(content, "frozen", codec.exactly(expected))
    if digest(tensors) != shape.frozen:
        raise RefusedError("its frozen tensors are not those of its architecture")
    return tensors


def _forms(shape: Architecture) -> Forms:
    full = layer_widths(unpruned(shape))
    if any(width > full.get(name, 0) for name, width in shape.channels):
        raise RefusedError(f"its architecture is wider than a {shape.family}")
    return forms_of(state_of(build(shape)))


def _masks(weights: Forms) -> Callable[[Forms], str | None]:
    def check(found: Forms) -> str | None:
        for name, form in found.items():
            if name not in weights or form != Form("bool", weights[name].shape):
                return f"are of another form ({name[:100]!r} is not a mask of weights)"
        return None

    return check


@reader
def read_shared(content: RecordDict, given: InputSpec, classes: int) -> Samples | None:
    """The samples that the server shares, if the message has any; `given` is their form."""
    if "gift" not in content:
        return None

    def check(found: Forms) -> str | None:
        inputs, labels = found.get("inputs"), found.get("labels")
        if found.keys() != {"inputs", "labels"} or labels is None or len(labels.shape) != 1:
            return "are not inputs and labels"
        fits = inputs == Form(given.dtype, (*labels.shape, *given.stored_shape)) and labels.dtype == "int64"
        return None if fits else f"are not samples ({given.describe()}) with a label each"

    tensors = codec.unpack(content, "gift", check)
    inputs, labels = tensors["inputs"], tensors["labels"]
    if not all_finite({"inputs": inputs}):
        raise RefusedError("its gift is not finite")
    if given.kind == "tokens":
        _require_below(given.vocabulary, inputs, "tokens")
    _require_below(classes, labels, "labels")
    return Samples(inputs, labels)


def _require_below(end: int, numbers: torch.Tensor, what: str) -> None:
    if ((numbers < 0) | (numbers >= end)).any():
        raise RefusedError(f"its gift has {what} that are not from 0 to {end - 1}")
