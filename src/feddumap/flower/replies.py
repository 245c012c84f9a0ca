"""What a device says to the server: its upload, its answer, or why there is none.

Every reader returns what it read or, whatever the message was, a `Refused`.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, RecordDict

from feddumap.flower import fields, wire
from feddumap.flower.answers import MOST_SAMPLES, forms_fault, values_fault
from feddumap.flower.fields import DEVICES, ROUNDS
from feddumap.flower.wire import RefusedError, reader
from feddumap.tensors import all_finite
from feddumap.types import Answer, Broadcast, Question, Upload


def pack_upload(upload: Upload) -> RecordDict:
    numbers = ConfigRecord(
        {
            "device": upload.device,
            "round": upload.round,
            "samples": upload.samples,
            "steps": upload.steps,
        }
    )
    tensors = wire.pack(weights=upload.weights, extra=upload.extra)
    return RecordDict({"upload": numbers, **fields.pack_values(upload.metrics, "metrics"), **tensors})


@reader
def read_upload(content: RecordDict, broadcast: Broadcast, device: int, most: int = MOST_SAMPLES) -> Upload:
    """A device's upload: its own, of this round, of the broadcast's form, finite, and of `most` samples."""
    refuse_refusals(content)
    numbers = fields.numbers_of(content, "upload")
    _expect(numbers, device, broadcast.round)
    samples = fields.integer(numbers, "samples", range(1, most + 1))
    steps = fields.integer(numbers, "steps", range(2**40))
    metrics = fields.read_values(content, "metrics")
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
    numbers = ConfigRecord({"device": answer.device, "round": number})
    values = fields.pack_values(answer.values, "values")
    return RecordDict({"answer": numbers, **values, **wire.pack(tensors=answer.tensors)})


@reader
def read_answer(content: RecordDict, question: Question, broadcast: Broadcast, device: int) -> Answer:
    """A device's answer to this question, as the question wants it."""
    refuse_refusals(content)
    numbers = fields.numbers_of(content, "answer")
    _expect(numbers, device, broadcast.round)
    values = fields.read_values(content, "values")
    if problem := values_fault(question, broadcast.architecture.classes, values):
        raise RefusedError(f"it {problem}")
    tensors = wire.unpack(content, "tensors", forms_fault(question, broadcast))
    if not all_finite(tensors):
        raise RefusedError("its answer is not finite")
    return Answer(device, values, tensors)


def _expect(numbers: ConfigRecord, device: int, number: int) -> None:
    found = fields.integer(numbers, "device", DEVICES)
    if found != device:
        raise RefusedError(f"it is of device {found}")
    stale = fields.integer(numbers, "round", ROUNDS)
    if stale != number:
        raise RefusedError(f"it is of round {stale}, not of round {number}")


def pack_refusal(reason: str) -> RecordDict:
    """A device's reason for not doing what it was asked."""
    return RecordDict({"refusal": ConfigRecord({"reason": reason})})


def refuse_refusals(content: RecordDict) -> None:
    if "refusal" in content:
        reason = fields.text(fields.numbers_of(content, "refusal"), "reason")
        raise RefusedError(f"it refused: {' '.join(reason.split())[:500]}")
