"""Text of others is printed as one harmless line, and every parser's error is a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddumap import config as configuration
from feddumap.cli import options
from feddumap.errors import LONGEST_ERROR, FeddumapError, escape_controls, printable, show
from feddumap.system import console
from feddumap.system.callbacks import to_stderr
from feddumap.system.json_text import parse_json, parse_toml

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\r\nforged line\u202etxt.exe\u2066\u200b\ud800 end"


def harmless(text: str) -> bool:
    return not any(
        ord(each) < 32
        or 127 <= ord(each) < 160
        or 0xD800 <= ord(each) < 0xE000
        or each in "\u202e\u2066\u200b"
        for each in text
    )


@given(st.text(max_size=200), st.integers(10, 100))
def test_printable(text: str, longest: int) -> None:
    made = printable(text, longest)
    assert harmless(made)
    assert len(made) <= longest
    assert made == printable(made, longest)
    plain = "".join(each for each in text if each.isalnum())[:longest]
    assert printable(plain, longest) == plain


def test_an_error_is_one_line() -> None:
    error = FeddumapError(f"the file {HOSTILE}: expected another")
    assert harmless(str(error))
    assert "\\x1b[2J" in str(error)
    assert str(error).endswith("expected another")
    long = FeddumapError(f"{'x' * 10**6}: expected less")
    assert len(str(long)) == LONGEST_ERROR
    assert str(long).endswith("x: expected less")


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    console.say(HOSTILE)
    to_stderr(HOSTILE)
    console.out.print(f"two lines\nof {HOSTILE}")
    console.table("title", ("column",), [(HOSTILE,)])
    options.print_json({"reason": HOSTILE, "greek": "τ"})
    printed = capsys.readouterr()
    assert harmless(printed.out.replace("\n", ""))
    assert harmless(printed.err.replace("\n", ""))
    assert "τ" in printed.out
    assert "two lines\nof a" in printed.out
    start = printed.out.index('{\n  "reason"')
    assert json.loads(printed.out[start:]) == {"reason": HOSTILE, "greek": "τ"}


def test_show_never_fails() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "a value that is nested too deeply"
    assert show([10**5000]) == "a value with a number of thousands of digits"
    assert len(show("x" * 10_000)) == 400
    while deep:  # not recursively
        deep = deep.pop()


@pytest.mark.parametrize(
    "text", ["[" * 2000, "9" * 5000, "[" * 500 + "]" * 500, '{"a":' * 2000, "NaN", "[1e999"]
)
def test_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested|digits|number|Expecting"):
        parse_json(text)


VALUES = [
    "[" * 2000,
    "[" * 2000 + "]" * 2000,
    "9" * 5000,
    "0x" + "f" * 5000,
    "-" + "9" * 5000,
    "0b" + "1" * 20_000,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value[:3]}-{len(value)}")
def test_settings(value: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f"[train]\nrounds = {value}\n")
    for path, sets in ((tmp_path / "config.toml", []), (None, [f"train.rounds={value}"])):
        with pytest.raises(FeddumapError) as caught:
            configuration.load(path, sets)
        assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("key", ["a" * 10**5, "\x1b[2J", "[" * 3000, "a=" + "b" * 10**5])
def test_odd_settings(key: str) -> None:
    for text in (key, f"train.{key}", f"train.{key}=3", f"{key}.rounds=3", f"method.{key}=[1]"):
        said = ""
        try:
            configuration.load(None, [text])
        except FeddumapError as error:
            said = str(error)
        assert harmless(said)
        assert len(said) <= LONGEST_ERROR


def test_a_number_that_toml_can_hold() -> None:
    assert parse_toml("a = " + "9" * 4000)["a"] == 10**4000 - 1
    assert sys.get_int_max_str_digits() == 4300
    assert escape_controls("\x1b", "\\u{:04x}") == "\\u001b"
