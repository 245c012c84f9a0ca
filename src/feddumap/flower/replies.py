"""Replies of a device to the server: its upload, its answer, or the reason why there is none.

A reader returns what it read or, for any invalid message, a `Refused`.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ConfigRecord, RecordDict

from feddumap.core.messages import Answer, Broadcast, Question, Upload
from feddumap.core.tensors import Forms, all_finite, forms_of
from feddumap.device.surveys import MOST_SAMPLES, SURVEYS
from feddumap.errors import unknown
from feddumap.flower import codec, fields
from feddumap.flower.codec import RefusedError, reader
from feddumap.flower.fields import DEVICES, ROUNDS

_SLACK = 1 << 20  # bytes
MOST_REASON = 500  # characters of a refusal


def pack_upload(upload: Upload) -> RecordDict:
    numbers = ConfigRecord(
        {
            "device": upload.device,
            "round": upload.round,
            "samples": upload.samples,
            "steps": upload.steps,
        }
    )
    tensors = codec.pack(weights=upload.weights, extra=upload.extra)
    return RecordDict({"upload": numbers, **tensors})


@reader
def read_upload(content: RecordDict, broadcast: Broadcast, device: int, most: int = MOST_SAMPLES) -> Upload:
    """A device's upload of this round: shaped like the broadcast, finite, and of at most `most` samples."""
    refuse_refusals(content)
    numbers = fields.record_of(content, "upload")
    _expect(numbers, device, broadcast.round)
    samples = fields.integer(numbers, "samples", range(1, most + 1))
    steps = fields.integer(numbers, "steps", range(2**40))
    form = forms_of(broadcast.weights)
    weights = codec.unpack(content, "weights", codec.exactly(form))
    extra = codec.unpack(content, "extra", codec.named_alike(form))
    if not (all_finite(weights) and all_finite(extra)):
        raise RefusedError("its model diverged (NaN or infinite)")
    return Upload(device, broadcast.round, samples, steps, weights, extra, finite=True)


def pack_answer(answer: Answer, number: int) -> RecordDict:
    """An answer to a question that was asked in round `number`."""
    numbers = ConfigRecord({"device": answer.device, "round": number})
    values = fields.pack_values(answer.values, "values")
    return RecordDict({"answer": numbers, **values, **codec.pack(tensors=answer.tensors)})


@reader
def read_answer(content: RecordDict, question: Question, broadcast: Broadcast, device: int) -> Answer:
    """A device's answer to this question, as the question's schema requires."""
    refuse_refusals(content)
    numbers = fields.record_of(content, "answer")
    _expect(numbers, device, broadcast.round)
    values = fields.read_values(content, "values")
    if question.name not in SURVEYS:
        raise unknown("question", question.name, SURVEYS)
    survey = SURVEYS[question.name]
    if problem := survey.fault(question, broadcast, values):
        raise RefusedError(f"it {problem}")
    check = _bounded(broadcast) if survey.forms is None else codec.exactly(survey.forms(question, broadcast))
    tensors = codec.unpack(content, "tensors", check)
    if not all_finite(tensors):
        raise RefusedError("its answer is not finite")
    return Answer(device, values, tensors)


def _bounded(broadcast: Broadcast) -> Callable[[Forms], str | None]:
    """A check for answers with any tensors: not much larger than a few models."""
    most = 4 * sum(form.nbytes for form in forms_of(broadcast.weights).values()) + _SLACK

    def check(found: Forms) -> str | None:
        size = sum(form.nbytes for form in found.values())
        return f"have {size} bytes, more than {most}" if size > most else None

    return check


def _expect(numbers: ConfigRecord, device: int, number: int) -> None:
    found = fields.integer(numbers, "device", DEVICES)
    if found != device:
        raise RefusedError(f"it is of device {found}")
    stale = fields.integer(numbers, "round", ROUNDS)
    if stale != number:
        raise RefusedError(f"it is of round {stale}, not of round {number}")


def pack_refusal(reason: str) -> RecordDict:
    """The reason why a device does not do what it was asked."""
    return RecordDict({"refusal": ConfigRecord({"reason": reason})})


def refuse_refusals(content: RecordDict) -> None:
    if "refusal" in content:
        reason = fields.text(fields.record_of(content, "refusal"), "reason")
        raise RefusedError(f"it refused: {' '.join(reason[:MOST_REASON].split())}")
