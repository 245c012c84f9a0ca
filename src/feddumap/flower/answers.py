"""What the answer to each question must look like, checked before the method sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from feddumap.flower.wire import Form, Forms, exactly, forms_of
from feddumap.pruning.rates import NodeRate
from feddumap.types import Broadcast, Question

MOST_SAMPLES = 2**40
_SLACK = 1 << 20  # bytes that an answer of a method of one's own may have beyond a few models


def forms_fault(question: Question, broadcast: Broadcast) -> Callable[[Forms], str | None]:
    """The check for the tensors of an answer."""
    weights = forms_of(broadcast.weights)
    match question.name:
        case "census" | "rate":
            return exactly({})
        case "ranks":
            widths = broadcast.architecture.widths
            return exactly({name: Form("float64", (widths[name],)) for name in question.settings["layers"]})
        case "first-mask":
            bits = {
                f"mask/{name}": Form("uint8", (-(-weights[name].count // 8),))
                for name in question.settings["weight"]
            }
            return exactly({**bits, **{f"weights/{name}": form for name, form in weights.items()}})
    most = 4 * sum(form.nbytes for form in weights.values()) + _SLACK

    def bounded(found: Forms) -> str | None:
        size = sum(form.nbytes for form in found.values())
        return f"have {size} bytes, more than {most}" if size > most else None

    return bounded


def values_fault(question: Question, classes: int, values: Mapping[str, Any]) -> str | None:
    """What is wrong with the numbers of an answer."""
    match question.name:
        case "census":
            return _census_fault(question, classes, values)
        case "rate":
            return _rate_fault(values)
        case "ranks" | "first-mask":
            return "has numbers, expected none" if values else None
    return None


def _census_fault(question: Question, classes: int, values: Mapping[str, Any]) -> str | None:
    labels = question.settings.get("labels")
    told = {"counts": {"counts"}, "gradient": {"gradient"}}.get(str(labels), set())
    if values.keys() != {"samples"} | told:
        return f"tells {sorted(values)}, expected {sorted({'samples'} | told)}"
    samples = values["samples"]
    if type(samples) is not int or not 0 < samples < MOST_SAMPLES:
        return f"tells {str(samples)[:40]} samples"
    for key in told:
        numbers = values[key]
        if not isinstance(numbers, list) or len(numbers) != classes or not all(map(_number, numbers)):
            return f"tells {key} that are not {classes} numbers"
        if key == "counts" and (min(numbers) < 0 or sum(numbers) != samples):
            return f"tells counts that do not add up to its {samples} samples"
        if key == "gradient" and (min(numbers) < -1 or max(numbers) > 1 / classes + 1e-9):
            return "tells a gradient that no labels have"
    return None


def _rate_fault(values: Mapping[str, Any]) -> str | None:
    names = {field.name for field in fields(NodeRate)}
    if values.keys() != names:
        return f"tells {sorted(values)[:10]}, expected {sorted(names)}"
    if not all(value is None or isinstance(value, bool) or _number(value) for value in values.values()):
        return "tells a pruning rate whose parts are not numbers"
    p = values["p"]
    if not isinstance(p, float) or not 0 <= p <= 1:
        return f"tells the pruning rate {str(p)[:40]}, expected a number from 0 to 1"
    return None


def _number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))
