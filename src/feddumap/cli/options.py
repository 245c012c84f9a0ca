"""What commands share: options, JSON output, notes, the command line itself and SIGTERM."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from feddumap.errors import escape_controls
from feddumap.system.signals import exit_code, sigterm_as_interrupt

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a configuration key; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the code that DIR names (module:function), even if you did not make DIR."
    ),
]
DatasetName = Annotated[
    str,
    typer.Argument(
        help="A data set, as data.name has it: digits, cifar10, cifar100, a file or folder, hub:NAME."
    ),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs to train in parallel; default one per core.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the runs and estimate the time they take.")]


def print_json(value: Any) -> None:
    """Print a value as indented JSON; paths become strings."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    print("\n".join(escape_controls(line, "\\u{:04x}") for line in text.split("\n")))


def toml(value: Any) -> str:
    """A default as it would be written in a configuration."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes to stderr as a list, for formats such as CSV that have no place for them."""
    from feddumap.system import console

    for note in notes:
        console.say(f"- {note}")


def command_line() -> str:
    """This command as it would be typed."""
    return shlex.join(["feddumap", *sys.argv[1:]])


@contextmanager
def resumable(message: str) -> Iterator[None]:
    """On Ctrl-C or SIGTERM, print how to resume and exit with the shell's code for the signal."""
    from feddumap.system import console

    try:
        with sigterm_as_interrupt():
            yield
    except KeyboardInterrupt as stop:
        console.say(message)
        raise typer.Exit(exit_code(stop)) from None


def exit_on_terminate(context: typer.Context) -> None:
    """Exit normally on SIGTERM for the rest of a command, so that context managers clean up."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))
