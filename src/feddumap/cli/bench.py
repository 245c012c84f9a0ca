"""`feddumap bench`: measure rounds on this machine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from feddumap.cli.options import Json, exit_on_terminate, print_json
from feddumap.cli.pages import Command

app = typer.Typer(
    help="Measure how fast rounds are on this machine.",
    no_args_is_help=True,
    suggest_commands=False,
    callback=exit_on_terminate,  # removes temporary data sets
)

Rounds = Annotated[int, typer.Option(min=1, help="Rounds to time, after a warm-up round.")]
Workers = Annotated[int, typer.Option(min=0, help="Number of worker processes; 0 is one per core.")]
Model = Annotated[str, typer.Option(help="cnn, lenet, vgg11, resnet18 or module:factory.")]


@app.command(cls=Command)
def rounds(
    model: Model = "cnn",
    rounds: Rounds = 5,
    workers: Workers = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs; 5 in the paper.")] = 5,
    samples: Annotated[int, typer.Option(min=1, help="Images per device; 400 in the paper.")] = 400,
    kernels: Annotated[
        Literal["c", "torch"] | None, typer.Option(help="Training kernels; default c where supported.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time rounds of the paper's FedAvg setting on random images.

    10 of 100 devices with 400 images each, batches of 10, without evaluation, augmentation or a run
    directory.
    """
    from feddumap.bench.rounds import bench_rounds
    from feddumap.bench.workload import Workload
    from feddumap.system import console

    with console.progress_bar() as progress:
        workload = Workload(model=model, epochs=epochs, samples=samples, workers=workers, kernels=kernels)
        found = bench_rounds(workload, rounds, progress)
    if as_json:
        print_json(found)
        return
    rows = [
        ("seconds per round, median", _seconds(found["seconds_per_round"])),
        *_spread(found),
        ("samples per second", found["samples_per_second"]),
        ("matrix products, billion multiply-adds per second", found["matrix_multiply_adds_per_second"] / 1e9),
        ("share of that throughput", console.percent(found["share_of_matrix_speed"])),
        ("kernels", found["kernels"]),
    ]
    title = f"{model} · {console.plural(rounds, 'round')} · {console.plural(found['workers'], 'worker')}"
    console.table(title, ("", ""), rows)


@app.command(cls=Command)
def overhead(rounds: Rounds = 20, workers: Workers = 0, as_json: Json = False) -> None:
    """Time rounds without local training.

    Devices return the received model unchanged; for a small and a large model.
    """
    from feddumap.bench.overhead import bench_overhead
    from feddumap.system import console

    with console.progress_bar() as progress:
        found = bench_overhead(rounds, workers, progress)
    if as_json:
        print_json(found)
        return
    columns = ("model", "parameters", "seconds per round", "min", "max", "start-up and first round")
    rows = [
        (
            case["model"],
            case["parameters"],
            _seconds(case["seconds_per_round"]),
            _seconds(case["spread"]["min"]),
            _seconds(case["spread"]["max"]),
            _seconds(case["startup_seconds"]),
        )
        for case in found["cases"]
    ]
    counts = f"{console.plural(rounds, 'round')} · {console.plural(found['workers'], 'worker')}"
    console.table(f"no local training · {counts}", columns, rows)


@app.command(cls=Command)
def scale(
    model: Model = "cnn",
    rounds: Rounds = 20,
    workers: Workers = 0,
    as_json: Json = False,
) -> None:
    """Time federations of 100 to 100,000 devices.

    They have 2 images each; also with a cohort of 1,000. Memory is the peak of all processes without the
    images. Needs 1 GB of temporary disk space.
    """
    from feddumap.bench.scale import bench_scale
    from feddumap.system import console

    with console.progress_bar() as progress:
        found = bench_scale(model, rounds, workers, progress)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            case["devices"],
            case["cohort"],
            _seconds(case["seconds_per_round"]),
            _seconds(case["startup_seconds"]),
            None if case["peak_bytes"] is None else case["peak_bytes"] / 1e6,
        )
        for case in found["cases"]
    ]
    columns = ("devices", "cohort", "seconds per round", "start-up and first round", "memory (MB)")
    console.table(f"{model} · {console.plural(found['workers'], 'worker')}", columns, rows)
    ratios = found["ratios"]
    console.out.print(
        f"Most devices relative to fewest: {_ratio(ratios['devices_seconds'])} the time, "
        f"{_ratio(ratios['devices_memory'])} the memory; largest cohort relative to smallest: "
        f"{_ratio(ratios['cohort_memory'])} the memory.",
        markup=False,
    )


@app.command(cls=Command)
def flower(
    model: Annotated[str, typer.Option(help="cnn, lenet, vgg11 or resnet18.")] = "lenet",
    nodes: Annotated[int, typer.Option(min=1, help="Number of devices, each a process on this machine.")] = 4,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Time rounds over Flower on this machine.

    With TLS and node keys; seconds, bytes and weights are compared with the same run in the simulation:
    FedAvg, one local epoch on the digits.
    """
    from feddumap.flower.local.programs import require_flower
    from feddumap.system import console

    require_flower()
    from feddumap.bench.flower import bench_flower

    with console.progress_bar() as progress:
        found = bench_flower(model, nodes, rounds, progress)
    if as_json:
        print_json(found)
        return
    over, alone = found["flower"], found["simulation"]
    down, up = found["bytes_down"], found["bytes_up"]
    rows = [
        ("seconds per round, median", *(_seconds(each["seconds_per_round"]) for each in (over, alone))),
        ("min", *(_seconds(each["spread"]["min"]) for each in (over, alone))),
        ("max", *(_seconds(each["spread"]["max"]) for each in (over, alone))),
        ("first round, seconds", *(_seconds(each["startup_seconds"]) for each in (over, alone))),
        ("bytes to devices", down["sent"], down["counted"]),
        ("bytes from devices", up["received"], up["counted"]),
    ]
    title = f"{model} · {console.plural(nodes, 'device')} · {console.plural(rounds, 'round')}"
    console.table(title, ("", "Flower", "simulation"), rows)
    more = (down["sent"] + up["received"]) / (down["counted"] + up["counted"]) - 1
    longer = over["seconds_per_round"] - alone["seconds_per_round"]
    console.out.print(
        f"A round over Flower takes {longer:.1f} s more, and {more:.1%} more bytes than the simulation "
        f"counts; the weights are {'bit-identical' if found['same_weights'] else 'NOT identical'}.",
        markup=False,
    )


def _spread(found: dict[str, Any]) -> list[tuple[str, Any]]:
    spread = found["spread"]
    return [
        ("min", _seconds(spread["min"])),
        ("lower quartile", _seconds(spread["lower_quartile"])),
        ("upper quartile", _seconds(spread["upper_quartile"])),
        ("max", _seconds(spread["max"])),
        ("start-up and first round, seconds", _seconds(found["startup_seconds"])),
    ]


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ×"
