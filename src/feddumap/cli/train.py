"""`feddumap train` and `feddumap resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddumap.cli.options import RunDirectory, Sets, Trust, command_line, toml
from feddumap.cli.pages import Command
from feddumap.config import describe, load
from feddumap.engine import forkserver
from feddumap.engine.registry import get_engine
from feddumap.errors import FeddumapError
from feddumap.system.signals import exit_code, sigterm_as_interrupt

if TYPE_CHECKING:
    from feddumap.run import Run


class TrainCommand(Command):
    """Adds a description of every configuration key to `train --help`."""

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
                shown = f"method.{key}" if default is None else f"method.{key} = {toml(default)}"
                used.setdefault((shown, f"{text} ({kind})"), []).append(name)
        with formatter.section("Keys of the methods"):
            formatter.write_dl([(key, f"{text}: {', '.join(names)}") for (key, text), names in used.items()])


def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Configuration file.")
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory; default runs/METHOD-MODEL-DATA-SEED.")
    ] = None,
) -> None:
    """Train a model and keep it in a run directory.

    The directory has the configuration, records, checkpoints and the summary.
    """
    settings = load(config, sets or ())
    if get_engine(settings.run.engine) is None:
        forkserver.prepare(settings.run.workers)
    parts = (settings.method.name, settings.model.name, Path(settings.data.name).stem, settings.run.seed)
    name = "-".join(map(str, parts)).replace(":", ".")
    from feddumap import run as api
    from feddumap.system import console

    run = api.start(settings, out or Path("runs") / name, console.say)
    assert run.directory is not None
    run.directory.note(command_line())
    _train_to_end(run)


def resume(
    directory: RunDirectory,
    workers: Annotated[int | None, typer.Option(help="Number of worker processes from now on.")] = None,
    rounds: Annotated[int | None, typer.Option(help="New total number of rounds.")] = None,
    tensorboard: Annotated[bool | None, typer.Option(help="Whether to write TensorBoard events.")] = None,
    wandb: Annotated[bool | None, typer.Option(help="Whether to log to Weights & Biases.")] = None,
    mlflow: Annotated[bool | None, typer.Option(help="Whether to log to MLflow.")] = None,
    trust: Trust = False,
) -> None:
    """Resume an interrupted run from its last checkpoint.

    The result is bit-identical to that of an uninterrupted run.
    """
    forkserver.prepare(workers)
    from feddumap import run as api
    from feddumap.runs.reader import read_config
    from feddumap.system import console

    get_engine(read_config(directory).run.engine)  # an engine that cannot be used is an error here
    trackers = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
    run = api.resume(directory, workers, rounds, console.say, runtime=trackers, trust=trust)
    if run.finished:
        console.say(f"{directory} is finished ({console.plural(run.state.round, 'round')})")
    else:
        console.say(f"resuming after {run.state.round} of {run.rounds} rounds")
    _train_to_end(run)


def _train_to_end(run: Run) -> None:
    from feddumap.progress import print_summary
    from feddumap.system import console

    assert run.directory is not None
    path = run.directory.path
    train_with_progress(run)
    print_summary(run.summary)
    console.out.print(f"run directory: {path}", markup=False)


def train_with_progress(run: Run, name: str = "") -> None:
    """Train to the end, showing progress. Ctrl-C and SIGTERM stop at a checkpoint and print how to resume."""
    from feddumap.progress import follow
    from feddumap.system import console

    assert run.directory is not None
    path = run.directory.path
    try:
        with sigterm_as_interrupt():
            follow(run, name)
    except OSError as error:
        raise FeddumapError(
            f"cannot write {path} ({error.strerror or error}), stopped after "
            f"{console.plural(run.state.round, 'round')}: fix "
            f"that, then run `feddumap resume {path}`"
        ) from error
    except KeyboardInterrupt as stop:
        console.say(
            f"stopped after {console.plural(run.state.round, 'round')}; resume with: feddumap resume {path}"
        )
        raise typer.Exit(exit_code(stop)) from None
    finally:
        run.close()
