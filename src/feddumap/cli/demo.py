"""`feddumap demo`: FedAvg, FedDUMAP and FedDUMAP-CS on the embedded digits, within a minute on two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from feddumap.cli.report import report
from feddumap.cli.train import train_with_progress
from feddumap.config import Config
from feddumap.engine import forkserver
from feddumap.errors import FeddumapError

TARGET = 0.8
INTRODUCTION = (
    "Twenty devices learn to classify handwritten digits. Each device holds only a few of the ten digits, "
    "and five devices train in each round. FedAvg averages their models. FedDUMAP also trains on the "
    "server's {images} images (of eight digits), applies momentum, and prunes filters after eight rounds, so "
    "that devices download and compute less. FedDUMAP-CS gives each device 30 of the server's images as "
    "well, half as many as it holds itself, and trains with a calibrated loss.\n"
)


def configurations(rounds: int) -> tuple[Config, ...]:
    """The configurations of the runs: FedAvg, FedDUMAP, FedDUMAP-CS."""
    fedavg = Config.parse(
        {
            "data": {
                "name": "digits",
                "devices": 20,
                "server_fraction": 0.15,
                "server_classes": 8,
                "augment": False,
            },
            "model": {"name": "lenet"},
            "train": {"rounds": rounds, "cohort": 5, "lr": 0.05},
            "run": {"targets": [TARGET]},
        }
    )
    return (
        fedavg,
        fedavg.replace(method={"name": "feddumap", "prune_round": 8}),
        fedavg.replace(method={"name": "feddumap-cs", "prune_round": 8, "shared_samples": 30}),
    )


def demo(
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the runs; default temporary.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to train.")] = 25,
) -> None:
    """Compare three methods on the embedded digits, in about a minute.

    They are FedAvg, FedDUMAP and FedDUMAP-CS.
    """
    import tempfile

    forkserver.prepare(None)
    from feddumap import run as api
    from feddumap.progress import side_by_side
    from feddumap.system import console

    folder = out or Path(tempfile.mkdtemp(prefix="feddumap-demo-"))
    summaries: list[dict[str, Any]] = []
    for config in configurations(rounds):
        name = config.method.name
        run = api.start(config, folder / name)
        if not summaries:
            console.out.print(INTRODUCTION.format(images=len(run.split.server)))
        train_with_progress(run, f"{name:11}")
        summaries.append(run.summary)
    console.out.print()
    side_by_side(summaries)
    console.out.print(f"Details: feddumap inspect run {folder / 'feddumap'}", markup=False)
    try:
        report([folder / summary["method"] for summary in summaries], folder / "report", figures=False)
    except FeddumapError as error:
        console.say(f"no report was written: {error}")
