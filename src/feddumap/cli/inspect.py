"""`feddumap methods` and `feddumap inspect`: methods, models, data sets and runs as tables."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from feddumap.cli.options import DatasetName, Json, RunDirectory, Sets, Trust, print_json, toml
from feddumap.cli.pages import Command
from feddumap.config import load

app = typer.Typer(
    help="Inspect a model, a data set, a run or what it would prune.",
    no_args_is_help=True,
    suggest_commands=False,
)

OWN = "feddumap"  # the origin of the methods of this package


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show the keys of this method.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or the configuration keys of one."""
    from feddumap.methods.listing import described, listed
    from feddumap.system import console

    found, broken = ([described(name)], []) if name is not None else listed()
    for sentence in broken:
        console.say(sentence)
    if as_json:
        print_json({entry.pop("name"): entry for entry in found})
    elif name is None:
        _show_methods(found)
    else:
        _show_method(found[0])


def _show_methods(found: list[dict[str, Any]]) -> None:
    from feddumap.system import console

    columns, rows = ["method", "description"], [[entry["name"], entry["summary"]] for entry in found]
    origins = [entry["from"] for entry in found]
    if set(origins) != {OWN}:
        columns.append("from")
        rows = [[*row, "" if origin == OWN else origin] for row, origin in zip(rows, origins, strict=True)]
    console.table("", columns, rows)
    console.out.print("`feddumap methods NAME` shows the keys of a method.", markup=False)


def _show_method(entry: dict[str, Any]) -> None:
    from feddumap.system import console

    origin = "" if entry["from"] == OWN else f" (from {entry['from']})"
    console.out.print(f"{entry['name']}{origin}: {entry['summary']}", markup=False)
    rows = [
        (
            f"method.{key}",
            None if each["default"] is None else toml(each["default"]),
            each["description"],
        )
        for key, each in entry["keys"].items()
    ]
    if rows:
        console.table("", ("key", "default", "description"), rows)
    else:
        console.out.print("It has no keys.")


@app.command(cls=Command)
def model(
    name: Annotated[str, typer.Argument(help="A name as for model.name, such as cnn.")],
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    as_json: Json = False,
) -> None:
    """Print a model's layers, parameters and multiply-adds."""
    from feddumap.models import architecture
    from feddumap.models.cost import layer_table, macs, parameters
    from feddumap.system import console

    shape = architecture(name, classes)
    layers = layer_table(shape)
    totals = {"parameters": parameters(shape), "macs": macs(shape)}
    if as_json:
        columns = ("layer", "kind", "shape", "parameters", "macs")
        rows = [dict(zip(columns, layer, strict=True)) for layer in layers]
        print_json({"model": name, "classes": classes, **totals, "layers": rows})
        return
    console.table(
        f"{name}, {classes} classes, input 3×32×32",
        ("layer", "kind", "weight", "parameters", "multiply-adds"),
        [*layers, ("total", "", "", totals["parameters"], totals["macs"])],
    )


@app.command(cls=Command)
def data(name: DatasetName, sets: Sets = None, as_json: Json = False) -> None:
    """Print how a data set is split among the devices and the server.

    With the non-IID degrees of devices, a cohort and the server.
    """
    from feddumap.data.label_mix import split_statistics
    from feddumap.system import console

    config = load(None, [*(sets or ()), f"data.name={json.dumps(name)}"])
    value = split_statistics(config, console.say)
    if as_json:
        print_json(value)
    else:
        _show_split(value)


def _show_split(value: dict[str, Any]) -> None:
    from feddumap.system import console

    degrees, samples, server = value["degree_devices"], value["samples"], value["server"]
    spread = console.span(degrees["min"], degrees["max"], ".3f")
    counts, users = list(value["labels"]["train"].values()), value["users"]
    rows = [
        ("input", value["input"]),
        ("training samples per class", console.span(min(counts), max(counts))),
        *([("users, samples per user", _users(users))] if users else []),
        ("training samples, test samples", f"{value['train']:,}, {value['test']:,}"),
        ("devices, partition", f"{value['devices']:,}, {value['partition']}"),
        (
            "samples per device",
            f"{console.span(samples['min'], samples['max'])}, {samples['total']:,} in total",
        ),
        ("non-IID degree of a device", f"{spread}, mean {degrees['mean']:.3f}"),
        ("non-IID degree of the first cohort", f"{value['degree_cohort']:.3f}"),
        ("samples on the server", f"{server['samples']:,} of {server['classes']} classes"),
        ("non-IID degree of the server", "-" if server["degree"] is None else f"{server['degree']:.3f}"),
    ]
    console.table(f"{value['data']}, {value['classes']} classes", ("", ""), rows)
    console.out.print(
        "Degrees are base-2 Jensen-Shannon divergences from the label mix of all devices, from 0 to 1."
    )


def _users(users: dict[str, int]) -> str:
    from feddumap.system.console import span

    nobody = f", {users['nobody']:,} without a user" if users["nobody"] else ""
    return f"{users['count']:,}, {span(users['min'], users['max'])}{nobody}"


@app.command(cls=Command)
def run(directory: RunDirectory, as_json: Json = False) -> None:
    """Print a run's accuracy, prunings, removed filters and costs."""
    from feddumap.runs import integrity
    from feddumap.runs.inspect import describe, show
    from feddumap.system import console

    value = describe(directory)
    for note in integrity.notes([directory]):
        console.say(note)
    if as_json:
        print_json(value)
    else:
        show(value)


@app.command(cls=Command)
def prune(
    directory: RunDirectory,
    rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="The rate, instead of the one the method finds.")
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Print what the run's method would remove if it pruned now.

    From its newest checkpoint, without changing anything.
    """
    from feddumap.runs.directory import require_trust
    from feddumap.runs.prune_preview import preview, show
    from feddumap.system import console

    require_trust(directory, trust, "inspecting the pruning of")
    with console.progress_bar() as progress:
        value = preview(directory, rate, console.say, progress)
    if as_json:
        print_json(value)
    else:
        show(value)
