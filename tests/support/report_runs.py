"""Runs for the tests of the report: one that was trained, and copies of it that tell of other seeds."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any

from feddumap import run as api
from feddumap.runs.reader import read_records
from tests.conftest import small

PRUNING = {"name": "feddumap", "prune_round": 2, "rate": "fixed", "fixed_rate": 0.6}
ROUNDS = 4


def make(folder: Path) -> Path:
    """FedDUMAP with seed 1 and FedAvg with seeds 1 and 2, the latter a copy that was not trained."""
    api.train(small(method=PRUNING, train={"rounds": ROUNDS}, run={"seed": 1}), folder / "feddumap")
    api.train(small(train={"rounds": ROUNDS}, run={"seed": 1}), folder / "fedavg-1")
    again(folder / "fedavg-1", folder / "fedavg-2", seed=2, add=0.1)
    return folder


def again(run: Path, copy: Path, seed: int, add: float = 0.0) -> None:
    """A copy of a run with another seed and accuracies that are higher by `add`."""
    shutil.copytree(run, copy)
    config = copy / "config.toml"
    config.write_text(config.read_text().replace("seed = 1\n", f"seed = {seed}\n"))
    records = [{**record, "accuracy": record["accuracy"] + add} for record in read_records(run)]
    write_records(copy, records)


def write_records(run: Path, records: list[dict[str, Any]], half: str = "") -> None:
    """Replace a run's records, and its summary if it is finished; `half` is a line that was not."""
    (run / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + half)
    summary = run / "summary.json"
    if summary.exists():
        summary.write_text(json.dumps({**json.loads(summary.read_text()), "rounds": len(records)}))


def page_data(text: str) -> Any:
    """What the script of a report's page gets, from its HTML."""
    (found,) = re.findall(r'<script type="application/octet-stream" id="data">(.*?)</script>', text)
    return json.loads(gzip.decompress(b64decode(found)))
