"""The form of what run directories hold in JSON: the keys that readers use, and their types.

Methods and later versions add keys, so unknown ones are accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from feddumap.core.messages import Architecture, Tensors
from feddumap.errors import FeddumapError
from feddumap.system.json_text import parse_json

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
DeviceName = Annotated[str, Field(pattern=r"^\d{1,18}$")]
LARGEST_INPUT = 1 << 26  # bytes of a sample


def _absent() -> Any:
    """The default of a key that may be missing but not null."""
    return Field(default=None)


class _Form(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Cost(_Form):
    before: Annotated[int, Field(gt=0, lt=2**63)]
    after: Count


class _Layer(_Form):
    filters: Annotated[int, Field(gt=0)] = _absent()
    weights: Annotated[int, Field(gt=0)] = _absent()
    kept: Count
    rate: Number

    @model_validator(mode="after")
    def _counted(self) -> Self:
        if (self.filters is None) == (self.weights is None):
            raise ValueError("expected either filters or weights")
        return self


class _Node(_Form):
    p: Number


class _Pruning(_Form):
    rate: Number
    threshold: Number | None
    layers: dict[str, _Layer]
    parameters: _Cost
    macs: _Cost
    nodes: list[_Node] = []
    refused: dict[str, str] = {}


class _DeviceAccuracy(_Form):
    mean: Number
    worst_tenth: Number
    spread: Number
    devices: Count


class _Validation(_Form):
    accuracy: Number
    within: Number = _absent()


class _Dominant(_Form):
    device: Count
    share: Number


class _Record(_Form):
    round: Count
    accuracy: Number | None = None
    loss: Number | None = None
    lr: Number = 0.0
    devices: list[Count] = []
    samples: Count = 0
    parameters: Count
    macs: Count
    bytes_down: Count
    bytes_up: Count
    clock: Number
    wall: Number
    alpha: Number | None = None
    tau_eff: Number | None = None
    server_accuracy: Number | None = None
    validation: _Validation = _absent()
    device_accuracy: _DeviceAccuracy = _absent()
    pruning: _Pruning = _absent()
    backdoor: Number = _absent()
    epsilon: Number | None = None
    dominant: _Dominant = _absent()
    lost: dict[DeviceName, str] = {}
    left_out: dict[DeviceName, str] = {}
    clipped: dict[DeviceName, Number] = {}
    dropped: list[Any] = []
    rejected: list[Any] = []


class _Checkpoint(_Form):
    round: Count
    clock: Number
    wall: Number
    devices: dict[DeviceName, Count]
    memories: dict[DeviceName, str] = {}
    architecture: dict[str, Any]


def record_problem(value: object, number: int) -> str | None:
    """Why a value is not the record of a round; None if it is.

    >>> record_problem({"round": 0, "clock": "soon"}, 0)
    'parameters: field required'
    """
    problem = _problem(_Record, value)
    if problem is None and isinstance(value, dict) and value["round"] != number:
        return f"round: {value['round']} instead of {number}"
    return problem


def record_line(record: Mapping[str, Any]) -> str:
    """The line of a record; an error for one that readers would take for damaged, since one of its method's
    metrics has a name for which they expect something else."""
    try:
        line = json.dumps(record, allow_nan=False)
        problem = record_problem(parse_json(line), record["round"])
    except ValueError as error:
        raise FeddumapError(
            f"round {record['round']} cannot be recorded ({error}): is a time of [clock] or a metric of the "
            "method infinite?"
        ) from None
    if problem is not None:
        raise FeddumapError(
            f"round {record['round']}: the method's metric {problem}; records use this name for something "
            "else: choose another one"
        )
    return line + "\n"


def checkpoint_problem(value: object) -> str | None:
    """Why a value is not the JSON part of a checkpoint, its checksums aside; None if it is."""
    return _problem(_Checkpoint, value)


def architecture_problem(shape: Architecture, tensors: Tensors) -> str | None:
    """Why tensors cannot be those of an architecture; None if they may be. It is asked before a network is
    built, which needs as much memory as the architecture says."""
    numbers = sum(tensor.numel() for tensor in tensors.values())
    widest = max([shape.classes, *shape.widths.values()])
    if widest > numbers:
        return f"its architecture has a layer of {widest} units, more than its {numbers} weights"
    if shape.classes < 1 or any(width < 1 for width in shape.widths.values()):
        return "its architecture has a layer without units"
    if math.prod(shape.input.shape) > LARGEST_INPUT:
        return f"its input has more than {LARGEST_INPUT} numbers"
    return None


def _problem(form: type[BaseModel], value: object) -> str | None:
    try:
        form.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"][0].lower() + first["msg"][1:]
        return f"{where}: {message}" if where else message
    return None
