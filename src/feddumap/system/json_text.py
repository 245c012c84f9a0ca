"""Reads JSON and TOML that others may have written: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any, TypeVar

DEEPEST = 100  # nested lists and mappings; the parsers' own limit depends on the stack
MOST_DIGITS, MOST_BITS = 4_300, 14_284  # Python's limit for integers, and the bits of the largest such

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; NaN, infinity, and values that are nested deeply are errors.

    >>> parse_json('{"a": [1]}')
    {'a': [1]}
    >>> parse_json("[" * 2000)
    Traceback (most recent call last):
    ...
    ValueError: it is nested too deeply
    """
    return _checked(lambda: json.loads(text, parse_constant=_no_constant))


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    >>> parse_toml("a = " + "9" * 5000)
    Traceback (most recent call last):
    ...
    ValueError: it has a number of more than 4300 digits
    """
    return _checked(lambda: tomllib.loads(text))


def _checked(parse: Callable[[], T]) -> T:
    try:
        value = parse()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        digits = "integer string conversion" in str(error)
        raise ValueError(f"it has a number of more than {MOST_DIGITS} digits" if digits else error) from None
    _check_values(value)
    return value


def _check_values(value: Any) -> None:
    """Refuse what cannot be written again: deep nesting, and integers of too many digits (hexadecimal ones
    can be read)."""
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner.extend(each.values())
            elif isinstance(each, list):
                inner.extend(each)
            elif isinstance(each, int) and each.bit_length() > MOST_BITS:
                raise ValueError(f"it has a number of more than {MOST_DIGITS} digits")
        if not inner:
            return
        level = inner
    raise ValueError("it is nested too deeply")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
