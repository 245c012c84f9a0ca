"""`feddumap grid`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddumap.cli.options import DryRun, Jobs, Json, Sets, command_line, print_json, resumable


def grid(
    file: Annotated[Path, typer.Argument(metavar="GRID.toml", help="A configuration with a [grid] table.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the run directories; default grids/GRID.")
    ] = None,
    jobs: Jobs = None,
    dry_run: DryRun = False,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Train all combinations of the values in [grid]; rerun to resume.

    A table compares the results.
    """
    from feddumap.sweep import status
    from feddumap.sweep.grid import cells
    from feddumap.system import console
    from feddumap.system.determinism import cores

    with resumable(f"stopped; resume with the same command: {command_line()}"):
        found = cells(file, out or Path("grids") / file.stem, sets or (), console.say)
        status.say_never_reached(found)
        if dry_run:
            plan = status.plan(found, jobs or cores())
            (print_json if as_json else status.show_plan)(plan)
            return
        failures = status.train(found, jobs or cores())
    (print_json if as_json else status.show_results)(status.results(found, failures))
    report_failures(failures)


def report_failures(failures: dict[str, str]) -> None:
    """Exit with code 1 if cells failed."""
    from feddumap.system import console

    if failures:
        console.say(f"failed: {', '.join(failures)} (reasons above); rerun the command to retry them")
        raise typer.Exit(1)
