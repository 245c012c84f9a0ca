"""`feddumap verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddumap.cli.options import Json, print_json
from feddumap.errors import FeddumapError


def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run directory, or the cache folder of a data set.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only look, and change nothing.")] = False,
    rewind: Annotated[
        bool,
        typer.Option(
            "--rewind",
            help="If records were altered, go back to the newest state before that, or to round 0.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check all files of a run or a data set's cache.

    What can be restored is restored. The exit code is 1 if damage stays.
    """
    from feddumap.data import cache_check
    from feddumap.runs.verify import Verification
    from feddumap.system import console

    if dry_run and rewind:
        raise FeddumapError("--dry-run and --rewind exclude each other: give one of them")
    if not directory.is_dir():
        raise FeddumapError(f"{directory} is not a folder: give a run directory or a data set's cache folder")
    if cache_check.is_cache(directory):
        found = cache_check.verify(directory, repair=not dry_run)
    else:
        found = Verification(directory, repair=not dry_run, rewind=rewind).run()
    if as_json:
        print_json([vars(each) for each in found])
    else:
        console.table("", ("file", "state", ""), [(each.path, each.state, each.message) for each in found])
    damaged = [each for each in found if each.state == "damaged"]
    if damaged:
        console.say(f"{directory}: {console.plural(len(damaged), 'file')} of {len(found)} damaged")
        raise typer.Exit(1)
