"""The commands of `feddumap flower`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from feddumap.cli.pages import Command
from feddumap.errors import FeddumapError
from feddumap.system.signals import exit_code, sigterm_as_interrupt

app = typer.Typer(
    help="Train over Flower, with devices on other machines.", no_args_is_help=True, suggest_commands=False
)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")]


@app.command(cls=Command)
def init(
    directory: Directory,
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml]", help="Configuration file; default a small one to try."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of devices; each gets a key pair. Default 4, or data.devices of CONFIG.toml."
        ),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME",
            help="Where devices reach the server; may be repeated.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of config.toml; may be repeated."),
    ] = None,
) -> None:
    """Create a folder with a federation ready to start.

    It has the Flower app, configuration, certificates and keys.
    """
    from feddumap.flower.local import programs, project
    from feddumap.system import console

    programs.require_flower()
    made = project.create(directory, nodes, hosts or (), sets or (), config, console.say)
    console.out.print(
        f"{directory} holds a federation of {made.nodes}: try it with `feddumap flower up {directory}`, and "
        f"read {directory / 'README.md'} for devices on other machines",
        markup=False,
    )


@app.command(cls=Command)
def up(
    directory: Directory,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Start this many devices; default all that have a key.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=1, metavar="SECONDS", help="Stop after this long, to resume later."),
    ] = None,
    shared_machine: Annotated[
        bool,
        typer.Option(
            "--shared-machine",
            help="Start even if this version of Flower is open to the other users of this machine.",
        ),
    ] = False,
) -> None:
    """Train with a server and devices on this machine; rerun to resume.

    They are processes, started before the training and stopped after it.
    """
    from feddumap.flower.local import programs, project
    from feddumap.progress import print_summary
    from feddumap.runs.reader import read_config
    from feddumap.runs.summary import finished, read_summary
    from feddumap.system import console

    programs.require_flower()
    from feddumap.flower.local import up as federation

    found = project.opened(directory)
    count = found.nodes if nodes is None else nodes
    if count > found.nodes or not count:
        raise FeddumapError(f"--nodes {count}: {directory / 'keys'} has keys for {found.nodes}")
    rounds = found.config().train.rounds
    summary = read_summary(found.run)
    if summary is not None and finished(found.run) and read_config(found.run).train.rounds >= rounds:
        console.say(f"{found.run} is finished ({console.plural(summary['rounds'], 'round')})")
    else:
        try:
            with sigterm_as_interrupt(), console.total_progress(rounds) as progress:
                pace, said = console.Pace(), {}

                def show(awaited: str, records: list[dict[str, Any]]) -> None:
                    done = len(records)
                    if not done or done not in said:  # the time left is updated once a round
                        said[done] = _status(awaited, records, rounds, pace)
                    status = f"{said[done]} · {awaited}" if done and awaited else said[done]
                    progress(done, status)

                trained = federation.up(found, count, timeout, console.say, show, shared_machine)
        except KeyboardInterrupt as stop:
            console.say(f"stopped; resume with: feddumap flower up {directory}")
            raise typer.Exit(exit_code(stop)) from None
        summary, traffic = trained.summary, trained.traffic
        sent, received, down, back = map(
            console.byte_size, (traffic.sent, traffic.received, traffic.counted_down, traffic.counted_up)
        )
        console.say(
            f"Flower sent {sent} to the devices and received {received}; of that, tensors and answers were "
            f"{down} and {back}"
        )
    print_summary(summary)
    console.out.print(f"run directory: {found.run}", markup=False)


def _status(awaited: str, records: list[dict[str, Any]], rounds: int, pace: Any) -> str:
    from feddumap.system import console

    if not records:
        return awaited
    accuracy = next((each["accuracy"] for each in reversed(records) if each["accuracy"] is not None), None)
    said = pace("round", len(records), rounds).split(" · ")
    clock = console.duration(records[-1]["clock"])
    return " · ".join([said[0], f"accuracy {console.percent(accuracy)}", f"clock {clock}", *said[1:]])
