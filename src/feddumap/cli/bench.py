"""The commands of `feddumap bench`: thin, they read options and show what was measured."""

from __future__ import annotations

import json
import signal
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(help="Measure how fast rounds are on this machine.", no_args_is_help=True)

Rounds = Annotated[int, typer.Option(min=1, help="Rounds to time, after a first one.")]
Workers = Annotated[int, typer.Option(min=0, help="Worker processes; 0 is one per core.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback()
def group(context: typer.Context) -> None:
    # a temporary data set is removed on SIGTERM too
    before = signal.signal(signal.SIGTERM, _terminate)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


def _terminate(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


@app.command()
def rounds(
    model: Annotated[str, typer.Option(help="cnn, lenet, vgg11, resnet18 or module:factory.")] = "cnn",
    rounds: Rounds = 5,
    workers: Workers = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs; the paper has 5.")] = 5,
    samples: Annotated[int, typer.Option(min=1, help="Images on a device; the paper has 400.")] = 400,
    kernels: Annotated[
        Literal["c", "torch"] | None, typer.Option(help="What computes gradients; by itself c where it can.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time rounds of the paper's FedAvg setting on random images: 10 of 100 devices with 400 images each,
    batches of 10. There is no evaluation, no augmentation and no run directory."""
    from feddumap.bench.rounds import bench_rounds
    from feddumap.bench.workload import Workload
    from feddumap.system import console

    with console.progress_bar() as progress:
        setting = Workload(model=model, epochs=epochs, samples=samples, workers=workers, kernels=kernels)
        found = bench_rounds(setting, rounds, progress)
    if as_json:
        _print_json(found)
        return
    rows = [
        ("seconds a round, median", _seconds(found["seconds_per_round"])),
        *_spread(found),
        ("samples a second", found["samples_per_second"]),
        ("matrix products, billion multiply-adds a second", found["matrix_multiply_adds_per_second"] / 1e9),
        ("share of their speed", console.percent(found["share_of_matrix_speed"])),
        ("kernels", found["kernels"]),
    ]
    title = f"{model} · {_times(rounds, 'round')} · {_times(found['workers'], 'worker')}"
    console.table(title, ("", ""), rows)


@app.command()
def overhead(rounds: Rounds = 20, workers: Workers = 0, as_json: Json = False) -> None:
    """Time rounds whose devices return the model they got, for a small and a large model."""
    from feddumap.bench.overhead import bench_overhead
    from feddumap.system import console

    with console.progress_bar() as progress:
        found = bench_overhead(rounds, workers, progress)
    if as_json:
        _print_json(found)
        return
    columns = ("model", "parameters", "seconds a round", "lowest", "highest", "start-up and first round")
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
    title = f"devices that do nothing · {_times(rounds, 'round')} · {_times(found['workers'], 'worker')}"
    console.table(title, columns, rows)


@app.command()
def scale(
    model: Annotated[str, typer.Option(help="cnn, lenet, vgg11, resnet18 or module:factory.")] = "cnn",
    rounds: Rounds = 20,
    workers: Workers = 0,
    as_json: Json = False,
) -> None:
    """Time federations of 100 to 100,000 devices with 2 images each, and a cohort of 1,000; memory is the
    highest of all processes, beyond the images. Takes a gigabyte of temporary disk space."""
    from feddumap.bench.scale import bench_scale
    from feddumap.system import console

    with console.progress_bar() as progress:
        found = bench_scale(model, rounds, workers, progress)
    if as_json:
        _print_json(found)
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
    columns = ("devices", "cohort", "seconds a round", "start-up and first round", "memory (MB)")
    console.table(f"{model} · {_times(found['workers'], 'worker')}", columns, rows)
    ratios = found["ratios"]
    console.out.print(
        f"Most devices against fewest: {_ratio(ratios['devices_seconds'])} the seconds, "
        f"{_ratio(ratios['devices_memory'])} the memory; largest cohort against smallest: "
        f"{_ratio(ratios['cohort_memory'])} the memory.",
        markup=False,
    )


@app.command()
def flower(
    model: Annotated[str, typer.Option(help="cnn, lenet, vgg11 or resnet18.")] = "lenet",
    nodes: Annotated[int, typer.Option(min=1, help="Devices, each a process of this machine.")] = 4,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Time rounds over Flower on this machine, with TLS and node keys, beside the same run in the simulation,
    and set the bytes that Flower sent beside those counted. FedAvg, an epoch on the digits."""
    from feddumap.flower.local.programs import require_flower
    from feddumap.system import console

    require_flower()
    from feddumap.bench.flower import bench_flower

    with console.progress_bar() as progress:
        found = bench_flower(model, nodes, rounds, progress)
    if as_json:
        _print_json(found)
        return
    over, alone = found["flower"], found["simulation"]
    down, up = found["bytes_down"], found["bytes_up"]
    rows = [
        ("seconds a round, median", *(_seconds(each["seconds_per_round"]) for each in (over, alone))),
        ("lowest", *(_seconds(each["spread"]["min"]) for each in (over, alone))),
        ("highest", *(_seconds(each["spread"]["max"]) for each in (over, alone))),
        ("first round, seconds", *(_seconds(each["startup_seconds"]) for each in (over, alone))),
        ("bytes to devices", down["sent"], down["counted"]),
        ("bytes from devices", up["received"], up["counted"]),
    ]
    title = f"{model} · {_times(nodes, 'device')} · {_times(rounds, 'round')}"
    console.table(title, ("", "over Flower", "simulated, counted"), rows)
    more = (down["sent"] + up["received"]) / (down["counted"] + up["counted"]) - 1
    longer = over["seconds_per_round"] - alone["seconds_per_round"]
    console.out.print(
        f"A round over Flower takes {longer:.1f} s more, with {more:.1%} more bytes than are counted; the "
        f"weights are {'the same' if found['same_weights'] else 'NOT the same'}, bit for bit.",
        markup=False,
    )


def _spread(found: dict[str, Any]) -> list[tuple[str, Any]]:
    spread = found["spread"]
    return [
        ("lowest", _seconds(spread["min"])),
        ("lower quartile", _seconds(spread["lower_quartile"])),
        ("upper quartile", _seconds(spread["upper_quartile"])),
        ("highest", _seconds(spread["max"])),
        ("start-up and first round, seconds", _seconds(found["startup_seconds"])),
    ]


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ×"


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))
