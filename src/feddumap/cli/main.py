"""The command line, assembled from its groups, and the exit code of errors."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from feddumap import __version__
from feddumap.cli import bench, data, flower, inspect
from feddumap.cli.compare import compare
from feddumap.cli.demo import demo
from feddumap.cli.export import export
from feddumap.cli.grid import grid
from feddumap.cli.pages import Command
from feddumap.cli.paper import paper
from feddumap.cli.report import report
from feddumap.cli.train import TrainCommand, resume, train
from feddumap.cli.verify import verify
from feddumap.errors import FeddumapError, printable

app = typer.Typer(
    help="Federated learning with shareable server data: simulate, compare, resume.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does
)
app.command(cls=TrainCommand)(train)
for command in (resume, grid, compare, export, paper, report, inspect.methods, verify, demo):
    app.command(cls=Command)(command)
app.add_typer(data.app, name="data")
app.add_typer(inspect.app, name="inspect")
app.add_typer(bench.app, name="bench")
app.add_typer(flower.app, name="flower")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> NoReturn:
    """Run the command line. User errors and failed reads and writes are one sentence and exit code 2."""
    try:
        app()
    except FeddumapError as error:
        _fail(str(error))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        _fail(f"cannot write or read{where}: {error.strerror or error}")
    sys.exit(0)


def _fail(message: str) -> NoReturn:
    from feddumap.system import console

    console.say(f"feddumap: {printable(' '.join(message.split()))}")
    sys.exit(2)
