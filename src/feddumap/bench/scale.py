"""Scaling with the number of devices and the cohort: seconds per round and peak memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from feddumap.bench.memory import peak_memory
from feddumap.bench.workload import CLASSES, Workload, measure, random_data
from feddumap.data import cache
from feddumap.models import architecture
from feddumap.system import children
from feddumap.system.callbacks import Progress, ignore

SIZES = ((100, 10), (1_000, 10), (10_000, 10), (100_000, 10), (1_000, 1_000))
"""(devices, cohort). The last is compared with the cohort of 10 of as many devices."""

SAMPLES = 2  # per device, so that 100,000 devices fit on disk
LARGE_COHORT_ROUNDS = 3


def bench_scale(
    model: str,
    rounds: int,
    workers: int = 0,
    progress: Progress = ignore,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> dict[str, Any]:
    """Measure each size in a fresh process, since freed memory is rarely returned to the system."""
    architecture(model, len(CLASSES))  # an unknown name fails early
    cases = []
    for number, (devices, cohort) in enumerate(sizes):
        progress("federations", number, len(sizes))
        workload = Workload(model, devices, cohort, SAMPLES, workers=workers)
        timed = min(rounds, LARGE_COHORT_ROUNDS) if cohort == devices else rounds
        with random_data(workload.images) as data:
            size = sum(path.stat().st_size for path in data.folder.iterdir())
            found = _in_fresh_process(workload, data.folder, timed)
        cases.append({"devices": devices, "cohort": cohort, "rounds": timed, "data_bytes": size, **found})
    progress("federations", len(sizes), len(sizes))
    return {
        "model": model,
        "samples_per_device": SAMPLES,
        "workers": workload.processes,
        "cases": cases,
        "ratios": ratios(cases),
    }


def ratios(cases: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Ratios of the largest to the smallest federation at equal cohorts, and of the largest to the smallest
    cohort at equal devices."""

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


def _in_fresh_process(workload: Workload, folder: Path, rounds: int) -> dict[str, Any]:
    job = json.dumps({"workload": asdict(workload), "folder": str(folder), "rounds": rounds})
    with children.start("feddumap.bench.scale", job) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"the process of a case exited with code {process.returncode}: see above")
    found: dict[str, Any] = json.loads(said)
    return found


def main() -> None:
    """Entry point of a process: measure the workload given as JSON argument and print the result."""
    children.exit_with_parent()
    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    peaks: list[int | None] = []
    times = measure(
        Workload(**job["workload"]),
        cache.read(folder, verify=False),
        job["rounds"],
        at_end=lambda: peaks.append(peak_memory(folder)),
    )
    print(json.dumps({**times.to_json(), "peak_bytes": peaks[0]}))


if __name__ == "__main__":
    main()
