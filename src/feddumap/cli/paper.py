"""`feddumap paper`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from feddumap.cli.grid import report_failures
from feddumap.cli.options import (
    DryRun,
    Jobs,
    Json,
    Sets,
    command_line,
    print_json,
    print_notes,
    resumable,
)
from feddumap.errors import FeddumapError

if TYPE_CHECKING:
    from feddumap.paper.item import Item
    from feddumap.sweep.grid import Cell

OUT = Path("paper")
Format = Literal["table", "markdown", "csv", "latex"]
MAX_LISTED = 8  # run directories listed one by one


def paper(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="list|NAME", help="An item of the paper, or list to see all.")
    ] = "list",
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of every run; 500 in the paper.")] = None,
    seeds: Annotated[
        str, typer.Option(metavar="N|A,B,…", help="Number of seeds (1 to N) or a list of seeds.")
    ] = "1",
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs, shared by all items.")] = OUT,
    jobs: Jobs = None,
    dry_run: DryRun = False,
    sets: Sets = None,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = "table",
    as_json: Json = False,
) -> None:
    """Train the runs of a table or figure of the paper.

    The results are compared with its numbers. Rerun to resume.
    """
    from feddumap.paper.item import find_item
    from feddumap.paper.run_names import cells
    from feddumap.sweep import status
    from feddumap.system import console
    from feddumap.system.determinism import cores

    if name == "list":
        _refuse_run_options(context)
        show_list(as_json)
        return
    item = find_item(name)
    changed = [*([f"train.rounds={rounds}"] if rounds else []), *(sets or ())]
    with resumable(f"stopped; resume with the same command: {command_line()}"):
        found = cells(item, out, parse_seeds(seeds), changed, console.say)
        status.say_never_reached(found)
        if dry_run:
            show_plan(item, status.plan(found, jobs or cores()), as_json)
            return
        failures = status.train(found, jobs or cores())
    show_results(item, found, changed, form, as_json)
    show_next_commands(found, out)
    report_failures(failures)


def _refuse_run_options(context: typer.Context) -> None:
    """`paper list` accepts no option but --json."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in ("name", "as_json") and source is not None and source.name == "COMMANDLINE":
            raise FeddumapError(f"{option.opts[0]} applies to one item: give its name instead of list")


def parse_seeds(seeds: str) -> list[int]:
    """The seeds given by --seeds: a count, or a comma-separated list.

    >>> parse_seeds("3"), parse_seeds("7,8"), parse_seeds("7,")
    ([1, 2, 3], [7, 8], [7])
    """
    parts = [part.strip() for part in seeds.split(",")]
    given = parts[:-1] if len(parts) > 1 and not parts[-1] else parts
    if not all(part.isdecimal() for part in given) or (len(parts) == 1 and not int(seeds)):
        raise FeddumapError(
            f"--seeds {seeds!r}: expected a number of seeds, such as 3, or a list of seeds, such as 1,2,3"
        )
    return list(range(1, int(seeds) + 1)) if len(parts) == 1 else [int(part) for part in given]


def show_list(as_json: bool) -> None:
    """List all items."""
    from feddumap.paper.item import all_items
    from feddumap.paper.tables import about
    from feddumap.sweep.grid import combinations
    from feddumap.system import console

    found = [(item, len(combinations(item.grid([1])))) for item in all_items()]
    if as_json:
        print_json([{**about(item), "runs": runs} for item, runs in found])
        return
    rows = [(item.name, item.number, item.shows, runs) for item, runs in found]
    console.table("", ("name", "paper", "shows", "runs"), rows, width=120)
    console.out.print(
        "Runs are per seed; items share runs, and each run is trained once. Next: "
        "feddumap paper NAME --dry-run",
        markup=False,
    )


def show_plan(item: Item, plan: dict[str, Any], as_json: bool) -> None:
    """Show what would be trained."""
    from feddumap.paper.tables import about
    from feddumap.sweep import status

    if as_json:
        print_json({**about(item), **plan})
        return
    show_title(item)
    status.show_plan(plan)


def show_title(item: Item) -> None:
    from feddumap.system import console

    console.out.print(f"{item.number} ({item.label}): {item.caption}", markup=False)


def show_results(item: Item, cells: list[Cell], changed: list[str], form: Format, as_json: bool) -> None:
    """Show the measured results next to the paper's numbers."""
    from feddumap.paper.results import results
    from feddumap.paper.tables import document
    from feddumap.report import tables

    shown = document(results(item, cells), changed, grouped=form != "csv")
    if as_json:
        print_json(shown.data)
    elif form == "table":
        show_title(item)
        tables.show(shown)
    else:
        print(tables.render(shown, form), end="")
        if form == "csv":
            print_notes(shown.notes)


def show_next_commands(cells: list[Cell], out: Path) -> None:
    """Print the commands that show more of these runs."""
    from feddumap.system import console

    paths = [str(cell.path) for cell in cells] if len(cells) <= MAX_LISTED else [str(out)]
    console.say(f"curves: feddumap report {shlex.join(paths)}")
    console.say(f"significance tests: feddumap compare {shlex.join(paths)}")
