"""Whether a large federation costs more than a small one: seconds a round, and memory at its highest."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from feddumap.bench.memory import peak_memory
from feddumap.bench.workload import CLASSES, Progress, Workload, measure, random_data, silent
from feddumap.data import dataset
from feddumap.models import architecture
from feddumap.system import children

SIZES = ((100, 10), (1_000, 10), (10_000, 10), (100_000, 10), (1_000, 1_000))
"""(devices, cohort). The last is compared with the cohort of 10 among as many devices."""

SAMPLES = 2  # a device, so that 100,000 of them fit on an ordinary disk
LARGE_COHORT_ROUNDS = 3


def bench_scale(
    model: str,
    rounds: int,
    workers: int = 0,
    progress: Progress = silent,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> dict[str, Any]:
    """Measure each size in a process of its own, since memory once taken is seldom given back."""
    architecture(model, len(CLASSES))  # a wrong name is told before any work
    cases = []
    for number, (devices, cohort) in enumerate(sizes):
        progress("federations", number, len(sizes))
        setting = Workload(model, devices, cohort, SAMPLES, workers=workers)
        timed = min(rounds, LARGE_COHORT_ROUNDS) if cohort == devices else rounds
        with random_data(setting.images) as data:
            size = sum(path.stat().st_size for path in data.folder.iterdir())
            found = _in_fresh_process(setting, data.folder, timed)
        cases.append({"devices": devices, "cohort": cohort, "rounds": timed, "data_bytes": size, **found})
    progress("federations", len(sizes), len(sizes))
    return {
        "model": model,
        "samples_per_device": SAMPLES,
        "workers": setting.processes,
        "cases": cases,
        "ratios": ratios(cases),
    }


def ratios(cases: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The largest federation against the smallest at equal cohorts, the largest cohort against the smallest
    at equal devices."""

    def ratio(after: dict[str, Any], before: dict[str, Any], key: str) -> float | None:
        return after[key] / before[key] if after[key] is not None else None

    small = [case for case in cases if case["cohort"] == cases[0]["cohort"]]
    most = max(cases, key=lambda case: case["cohort"])
    fewest = next(case for case in small if case["devices"] == most["devices"])
    return {
        "devices_seconds": ratio(small[-1], small[0], "seconds_per_round"),
        "devices_memory": ratio(small[-1], small[0], "peak_bytes"),
        "cohort_memory": ratio(most, fewest, "peak_bytes"),
    }


def _in_fresh_process(setting: Workload, folder: Path, rounds: int) -> dict[str, Any]:
    order = json.dumps({"setting": asdict(setting), "folder": str(folder), "rounds": rounds})
    with children.start("feddumap.bench.scale", order) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"the process of a case exited with code {process.returncode}: see above")
    found: dict[str, Any] = json.loads(said)
    return found


def main() -> None:
    """One case: reads its order from the command line, prints what it measured."""
    children.exit_with_parent()
    order = json.loads(sys.argv[1])
    folder = Path(order["folder"])
    peaks: list[int | None] = []
    times = measure(
        Workload(**order["setting"]),
        dataset.read(folder, verify=False),
        order["rounds"],
        at_end=lambda: peaks.append(peak_memory(folder)),
    )
    print(json.dumps({**times.to_json(), "peak_bytes": peaks[0]}))


if __name__ == "__main__":
    main()
