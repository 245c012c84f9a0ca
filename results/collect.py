"""Copies what is kept of finished runs (configuration, records, summary) from grids into results/runs.

python results/collect.py GRID_FOLDER [GRID_FOLDER ...]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from feddumap.runs.summary import finished

KEPT = ("config.toml", "records.jsonl", "summary.json")
RUNS = Path(__file__).parent / "runs"


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        for config in sorted(folder.glob("*/config.toml")):
            run = config.parent
            if not finished(run):
                continue
            target = RUNS / folder.name / run.name
            target.mkdir(parents=True, exist_ok=True)
            for name in KEPT:
                shutil.copy(run / name, target / name)
            print(target.relative_to(RUNS.parent))


if __name__ == "__main__":
    main()
