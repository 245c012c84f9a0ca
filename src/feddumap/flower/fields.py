"""Reading the numbers, texts and flags of a message, each checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from feddumap.flower.codec import RefusedError
from feddumap.system.json_text import parse_json

MOST_TEXT = 4 << 20  # characters of a JSON text
INTEGERS = range(-(2**53), 2**53)
DEVICES, ROUNDS = range(2**31), range(2**31)
TOKEN = re.compile(r"[0-9a-f]{32}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def record_of(content: RecordDict, key: str) -> ConfigRecord:
    """A record of numbers, texts and flags."""
    record = content.get(key)
    if not isinstance(record, ConfigRecord):
        raise RefusedError(f"it has no record {key!r}")
    return record


def integer(record: ConfigRecord, key: str, allowed: range = INTEGERS) -> int:
    value = record.get(key)
    if type(value) is not int or value not in allowed:
        raise RefusedError(
            f"its {key} is {str(value)[:40]!r}, expected a whole number from {allowed[0]} to {allowed[-1]}"
        )
    return value


def real(record: ConfigRecord, key: str) -> float:
    value = record.get(key)
    if type(value) is not float or not math.isfinite(value):
        raise RefusedError(f"its {key} is {str(value)[:40]!r}, expected a finite number")
    return value


def text(record: ConfigRecord, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise RefusedError(f"its {key} is missing, no text or longer than {MOST_TEXT} characters")
    return value


def flag(record: ConfigRecord, key: str) -> bool:
    value = record.get(key)
    if not isinstance(value, bool):
        raise RefusedError(f"its {key} is {str(value)[:40]!r}, expected true or false")
    return value


def mapping(record: ConfigRecord, key: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = parse_json(text(record, key))
    except ValueError as error:
        raise RefusedError(f"its {key} is not JSON ({str(error)[:100]})") from None
    if not isinstance(value, dict):
        raise RefusedError(f"its {key} is not a JSON object")
    return value


def token(record: ConfigRecord) -> str:
    found = text(record, "token")
    if not TOKEN.fullmatch(found):  # it becomes the name of a folder
        raise RefusedError("its token is not 32 hexadecimal digits")
    return found


def sha256(text: str) -> str:
    """The text, if it is a hash or empty."""
    if text and not SHA256.fullmatch(text):  # it becomes the name of a file
        raise RefusedError("its hash of frozen tensors is not 64 hexadecimal digits")
    return text


def pack_values(values: Mapping[str, Any], key: str) -> dict[str, MetricRecord | ConfigRecord]:
    """Values as records: numbers and lists of numbers as metrics under this key, the others as JSON."""
    numbers = {name: value for name, value in values.items() if _is_metric(value)}
    rest = {name: value for name, value in values.items() if name not in numbers}
    records: dict[str, MetricRecord | ConfigRecord] = {}
    if numbers:
        records[key] = MetricRecord(numbers)
    if rest:
        records[f"{key}-rest"] = ConfigRecord({"json": json.dumps(rest, allow_nan=False)})
    return records


def read_values(content: RecordDict, key: str) -> dict[str, Any]:
    """The values packed under this key; empty if there are none."""
    numbers = content.get(key, MetricRecord())
    if not isinstance(numbers, MetricRecord):
        raise RefusedError(f"its {key} are not a record of metrics")
    rest = mapping(record_of(content, f"{key}-rest"), "json") if f"{key}-rest" in content else {}
    for name, value in numbers.items():
        if not all(map(math.isfinite, value if isinstance(value, list) else [value])):
            raise RefusedError(f"its {key} are not finite ({name[:100]!r})")
    if rest.keys() & numbers.keys():
        raise RefusedError(f"its {key} have a name twice")
    return {**numbers, **rest}


def _is_metric(value: object) -> bool:
    if not isinstance(value, list):
        return type(value) in (int, float)
    return bool(value) and {type(each) for each in value} in ({int}, {float})
