"""Errors with a message for the user: the value, what was expected and what to do; and text that is safe to
print, whoever wrote it."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_ERROR, LONGEST_VALUE = 4_000, 400  # characters

# C0 and C1 controls (escape sequences), marks that reorder or hide text, separators of lines, surrogates
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_SPACES = str.maketrans("\t\n\v\f\r\x85\u2028\u2029", " " * 8)


class FeddumapError(Exception):
    """An error the user can fix. The command line prints it and exits with code 2.

    The message is one line of printable characters, since it may quote files and messages of others.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), LONGEST_ERROR))


def printable(text: str, longest: int | None = None) -> str:
    """One line that a terminal or a log can show as it is: control characters, such as those of escape
    sequences, and marks that reorder text become `\\x1b` and the like. From a text of more than `longest`
    characters the middle is left out.

    >>> printable("a\\x1b[2J\\nb\\u202ec"), printable("abcdefgh", 5)
    ('a\\\\x1b[2J b\\\\u202ec', 'abc…h')
    """
    return _shortened(escape_controls(_shortened(text, longest).translate(_SPACES)), longest)


def _shortened(text: str, longest: int | None) -> str:
    if longest is None or len(text) <= longest:
        return text
    end = (longest - 1) // 4
    return f"{text[: longest - 1 - end]}…{text[len(text) - end :]}"


def escape_controls(text: str, escape: str = "") -> str:
    """Replace unprintable characters; `escape` is the format of a replacement, by default Python's."""
    return _UNPRINTABLE.sub(lambda found: _escaped(found[0], escape), text)


def _escaped(character: str, form: str) -> str:
    if form:
        return form.format(ord(character))
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def show(value: object) -> str:
    """`repr` for an error, which never fails and is not long.

    >>> show("a"), show(16**5000)
    ("'a'", 'a number of 20001 bits')
    """
    try:
        return printable(repr(value), LONGEST_VALUE)
    except RecursionError:
        return "a value that is nested too deeply"
    except ValueError:  # Python refuses to write integers of more than 4,300 digits
        if isinstance(value, int):
            return f"a number of {value.bit_length()} bits"
        return "a value with a number of thousands of digits"


def unknown(kind: str, name: str, known: Iterable[str]) -> FeddumapError:
    """The error for an unknown name, with the closest known one.

    >>> print(unknown("method", "fedavgg", ["fedavg", "feddu"]))
    unknown method 'fedavgg': did you mean 'fedavg'? Known: fedavg, feddu
    """
    names = sorted(known)
    near = get_close_matches(name[:LONGEST_VALUE], names, n=1)
    hint = f"did you mean {near[0]!r}? Known" if near else "known"
    return FeddumapError(f"unknown {kind} {show(name)}: {hint}: {', '.join(names)}")
