"""The command `feddumap paper`: thin, it reads options, has the runs trained and shows them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from feddumap.errors import FeddumapError
from feddumap.system.signals import exit_code, terminated_like_interrupted

if TYPE_CHECKING:
    from feddumap.paper.item import Item
    from feddumap.sweep.grid import Cell

OUT = Path("paper")
Format = Literal["table", "markdown", "csv", "latex"]
MANY = 8  # directories that are named one by one


def paper(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="list|NAME", help="An item, or list to see all.")] = "list",
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of every run; the paper has 500.")] = None,
    seeds: Annotated[
        str, typer.Option(metavar="N|A,B,…", help="Number of seeds (1 to N), or the seeds themselves.")
    ] = "1",
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs, which all items share.")] = OUT,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default one per core.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and the time they take.")] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of all runs; may be repeated."),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How to show it.")] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Train the runs of a table or figure of the paper, or go on with them, and set its numbers beside."""
    from feddumap.paper.item import find_item
    from feddumap.paper.run_names import cells
    from feddumap.sweep import status
    from feddumap.system import console
    from feddumap.system.determinism import cores

    if name == "list":
        refuse_others(context)
        show_list(as_json)
        return
    item = find_item(name)
    changed = [*([f"train.rounds={rounds}"] if rounds else []), *(sets or ())]
    try:
        with terminated_like_interrupted():
            found = cells(item, out, numbers(seeds), changed, console.say)
            if dry_run:
                show_plan(item, status.plan(found, jobs or cores()), as_json)
                return
            failures = status.train(found, jobs or cores())
    except KeyboardInterrupt as stop:
        console.say(f"stopped; go on with the same command: feddumap {shlex.join(sys.argv[1:])}")
        raise typer.Exit(exit_code(stop)) from None
    show_results(item, found, changed, form, as_json)
    further(found, out)
    if failures:
        console.say(f"failed: {', '.join(failures)} (reasons above); the same command tries them again")
        raise typer.Exit(1)


def refuse_others(context: typer.Context) -> None:
    """A list has no options but --json."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in ("name", "as_json") and source is not None and source.name == "COMMANDLINE":
            raise FeddumapError(f"{option.opts[0]} is for the runs of one item: name it instead of list")


def numbers(seeds: str) -> list[int]:
    """The seeds that an option stands for.

    >>> numbers("3"), numbers("7,8"), numbers("7,")
    ([1, 2, 3], [7, 8], [7])
    """
    parts = [part.strip() for part in seeds.split(",")]
    given = parts[:-1] if len(parts) > 1 and not parts[-1] else parts
    if not all(part.isdecimal() for part in given) or (len(parts) == 1 and not int(seeds)):
        raise FeddumapError(
            f"--seeds {seeds!r}: expected a number of seeds, such as 3, or seeds, such as 1,2,3"
        )
    return list(range(1, int(seeds) + 1)) if len(parts) == 1 else [int(part) for part in given]


def show_list(as_json: bool) -> None:
    """All items."""
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
        "Runs are those of one seed; items share many of them, and a run is trained once. To begin: "
        "feddumap paper NAME --dry-run",
        markup=False,
    )


def show_plan(item: Item, plan: dict[str, Any], as_json: bool) -> None:
    """What would be trained."""
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
    """What was measured beside the paper's numbers."""
    from feddumap.paper.results import results
    from feddumap.paper.tables import document
    from feddumap.report import tables
    from feddumap.system import console

    shown = document(results(item, cells), changed, grouped=form != "csv")
    if as_json:
        print_json(shown.data)
    elif form == "table":
        show_title(item)
        tables.show(shown)
    else:
        print(tables.render(shown, form), end="")
        if form == "csv":
            for note in shown.notes:
                console.say(f"- {note}")


def further(cells: list[Cell], out: Path) -> None:
    """Where to look from here."""
    from feddumap.system import console

    paths = [str(cell.path) for cell in cells] if len(cells) <= MANY else [str(out)]
    console.say(f"curves and more: feddumap report {shlex.join(paths)}")
    console.say(f"tests over seeds: feddumap compare {shlex.join(paths)}")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
