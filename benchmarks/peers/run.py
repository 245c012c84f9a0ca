"""feddumap, Flower's simulation and pfl-research on the same task, alternately: medians and ratios.

    .venv/bin/python benchmarks/peers/run.py --python /tmp/peers/bin/python --out peers.json

See README.md beside it for what is measured. With `--out` an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
from engines import EMPTY_MODELS, ENGINES, Job

from feddumap.system import console
from feddumap.system.atomic_files import write_bytes

TASKS = ("rounds", "empty", "start")
TITLES = {"rounds": "a round", "empty": "an empty round", "start": "to the first round's end"}
Measurement = dict[str, Any]


def main() -> None:
    options = _options()
    kept: list[Measurement] = []
    if options.out is not None and options.out.exists():
        kept = json.loads(options.out.read_text())["measurements"]
    versions = engines.versions(options.python)
    with tempfile.TemporaryDirectory(prefix="feddumap-peers-") as temporary:
        bench = engines.Bench(
            options.python, options.rounds, options.epochs, options.samples, Path(temporary)
        )
        for repetition in range(options.repetitions):
            for job in _jobs(options):
                signature = {
                    "repetition": repetition,
                    "rounds": options.rounds,
                    "epochs": options.epochs,
                    "samples": options.samples,
                    "engine": job.engine,
                }
                wanted = [{**signature, "task": task, "model": model} for task, model in job.gives]
                if all(any(one.items() <= old.items() for old in kept) for one in wanted):
                    continue
                console.say(f"repetition {repetition + 1} of {options.repetitions}: {job}")
                seconds = bench.measure(job)
                kept += [{**one, "seconds": seconds[one["task"], one["model"]]} for one in wanted]
                _save(options.out, versions, kept)
    setting = {name: getattr(options, name) for name in ("rounds", "epochs", "samples")}
    chosen = [one for one in kept if setting.items() <= one.items()]
    _show(medians(chosen), versions)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="the peers' Python, with requirements.txt")
    parser.add_argument("--models", nargs="+", default=["lenet", "cnn"], help="lenet, cnn, vgg11, resnet18")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="rounds to time in each, after a first one")
    parser.add_argument("--epochs", type=int, default=5, help="fewer make VGG11 and ResNet18 bearable")
    parser.add_argument("--samples", type=int, default=400, help="images on a device; fewer for ResNet18")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=ENGINES, help="engines")
    parser.add_argument(
        "--out", type=Path, help="JSON file with every measurement; go on with it if it exists"
    )
    return parser.parse_args()


def _jobs(options: argparse.Namespace) -> Iterator[Job]:
    """The processes of one repetition. A peer's time to its first round comes with its rounds."""
    tasks, only = options.tasks, options.only
    for model in options.models:
        for engine in only:
            if engine == "ours":
                yield from (Job(engine, ((task, model),)) for task in ("rounds", "start") if task in tasks)
            elif "rounds" in tasks or "start" in tasks:
                yield Job(engine, (("rounds", model), ("start", model)))
    if "empty" in tasks:
        if "ours" in only:
            yield Job("ours", tuple(("empty", model) for model in EMPTY_MODELS))
        if "flower" in only:
            yield from (Job("flower", (("empty", model),)) for model in EMPTY_MODELS)


def _save(out: Path | None, versions: dict[str, str], kept: list[Measurement]) -> None:
    if out is not None:
        value = {"versions": versions, "medians": medians(kept), "measurements": kept}
        write_bytes(out, (json.dumps(value, indent=1) + "\n").encode())


def medians(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """A row for each task, model and setting: the engines' medians, and how many times ours each takes."""
    names = ("task", "model", "rounds", "epochs", "samples")
    keys = dict.fromkeys(tuple(one[name] for name in names) for one in measurements)
    rows = []
    for key in sorted(keys, key=lambda key: TASKS.index(key[0])):
        same = [one for one in measurements if tuple(one[name] for name in names) == key]
        middle = {
            engine: statistics.median(values)
            for engine in ENGINES
            if (values := [one["seconds"] for one in same if one["engine"] == engine])
        }
        ours = middle.get("ours")
        ratios = {engine: value / ours for engine, value in middle.items() if ours and engine != "ours"}
        rows.append({**dict(zip(names, key, strict=True)), "seconds": middle, "ratios": ratios})
    return rows


def _show(rows: list[dict[str, Any]], versions: dict[str, str]) -> None:
    def cell(row: dict[str, Any], engine: str) -> str:
        if engine not in row["seconds"]:
            return "-"
        ratio = f" ({row['ratios'][engine]:.2f} ×)" if engine in row["ratios"] else ""
        return f"{row['seconds'][engine]:.3f}{ratio}"

    columns = ("", "model", "feddumap", "Flower", "pfl", "pfl, 2 processes")
    shown = [(TITLES[row["task"]], row["model"], *(cell(row, engine) for engine in ENGINES)) for row in rows]
    title = " · ".join(f"{name} {version}" for name, version in versions.items())
    console.table(f"median seconds (times ours) · {title}", columns, shown)


if __name__ == "__main__":
    main()
