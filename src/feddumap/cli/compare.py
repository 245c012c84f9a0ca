"""`feddumap compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from feddumap.cli.options import print_notes


def compare(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders of them.")
    ],
    targets: Annotated[
        list[float] | None,
        typer.Option(
            "--target", help="Target accuracy, such as 0.5; may be repeated. Default: the runs' targets."
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="Series to compare with; default fedavg, else the first."),
    ] = None,
    measure: Annotated[
        Literal["final", "mean10", "best_smoothed"],
        typer.Option(help="Accuracy measure of the significance test."),
    ] = "mean10",
    form: Annotated[
        Literal["table", "markdown", "csv", "latex", "json"], typer.Option("--format", help="Output format.")
    ] = "table",
    out: Annotated[Path | None, typer.Option("--out", help="Write to this file instead of stdout.")] = None,
) -> None:
    """Compare runs over seeds.

    Accuracy, time to target accuracies, cost, and a significance test against a base.
    """
    from feddumap.report import statistics as numbers
    from feddumap.report import tables
    from feddumap.report.comparison import document
    from feddumap.report.notes import notes
    from feddumap.report.series import find_runs, group_runs
    from feddumap.runs import integrity
    from feddumap.system import console
    from feddumap.system.atomic_files import write_text

    runs = find_runs(directories)
    for note in integrity.notes([run.path for run in runs]):
        console.say(note)
    found = group_runs(runs)
    value = numbers.compare(found, targets or (), base, measure)
    shown = document(value, notes(found, value))
    if out is not None:
        write_text(out, tables.render(shown, form))
        console.say(f"wrote {out}")
    elif form == "table":
        tables.show(shown)
    else:
        print(tables.render(shown, form), end="")
    if form == "csv":
        print_notes(shown.notes)
