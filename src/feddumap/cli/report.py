"""`feddumap report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders of them.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Output folder.")] = Path("report"),
    title: Annotated[
        str,
        typer.Option("--title", metavar="TEXT", help="Title of the page.", show_default="names of DIR..."),
    ] = "",
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    figures: Annotated[bool, typer.Option(help="Also write the figures as PNG and SVG, for a paper.")] = True,
) -> None:
    """Write an HTML page about runs, finished or in training.

    Its figures are written as PNG and SVG too.
    """
    import webbrowser

    from feddumap.report.page import document
    from feddumap.report.page.sections import content, some
    from feddumap.report.series import find_runs
    from feddumap.runs import integrity
    from feddumap.system import console

    document.require_packages(figures=figures)
    names = [path.resolve().name or str(path) for path in directories]
    runs = find_runs(directories)
    for note in integrity.notes([run.path for run in runs]):
        console.say(note)
    value = content(title or some(names, 3), runs)
    with console.progress_bar() as progress:
        path = document.write(out, value, progress, figures=figures)
    console.out.print(f"report: {path}", markup=False)
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        console.say(f"no browser was found: open {path} in one")
