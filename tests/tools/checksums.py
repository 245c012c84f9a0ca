"""Checksums of short runs that cover the product, to show that a change of structure changes no bit.

    python tests/tools/checksums.py before.json          # on the commit before
    python tests/tools/checksums.py after.json
    python tests/tools/checksums.py --compare before.json after.json

Every method of `feddumap methods` trains on the digits with one and with two workers, one run prunes on
CIFAR-10 (which must be in the cache), and with `--flower` one goes over Flower. Only commands and files of
the run directory are used, so the tool does not depend on where the code is. A run whose checksum is in the
file is not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import numpy as safetensors

COMMAND = [sys.executable, "-m", "feddumap"]
SMALL = ["data.devices=20", "model.name=lenet", "train.rounds=3", "train.cohort=2", "train.epochs=1"]
SMALL += ["train.batch=32", "train.lr=0.05"]
QUICK = {
    "prune_round": "1",
    "rate": "density",
    "rate_nodes": "selected",
    "budget": "small",
    "adjust_every": "1",
    "first_passes": "20",
    "vote_epochs": "2",
    "subsets": "2",
}
"""Set where a method has the key, so that what it does once is done early and costs little."""

CIFAR = ["data.name=cifar10", "model.name=lenet", "method.name=feddumap", "method.prune_round=1"]
CIFAR += ["method.rate_nodes=selected", "train.rounds=3", "train.epochs=1", "train.calibration=1.0"]


def checksum(run: Path) -> str:
    """Of the tensors of the last checkpoint, and of the records without how long they took."""
    sha = hashlib.sha256()
    newest = max(run.glob("checkpoint-*.safetensors"))
    for name, array in sorted(safetensors.load_file(newest).items()):
        sha.update(f"{name} {array.dtype} {array.shape};".encode() + array.tobytes())
    for line in (run / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        record.pop("wall")
        sha.update(json.dumps(record, sort_keys=True).encode())
    return sha.hexdigest()[:16]


def cases(*, flower: bool) -> dict[str, list[str]]:
    """The settings of every run, by name."""
    listed = subprocess.run([*COMMAND, "methods", "--json"], capture_output=True, text=True, check=True)
    found = {}
    for method, about in json.loads(listed.stdout).items():
        keys = [f"method.{key}={value}" for key, value in QUICK.items() if key in about["keys"]]
        for workers in (1, 2):
            found[f"{method}, {workers} workers"] = [
                *SMALL, f"method.name={method}", *keys, f"run.workers={workers}",
            ]  # fmt: skip
    found["feddumap, cifar10"] = CIFAR
    if flower:
        found["feddumap, flower"] = [
            *SMALL[2:], "data.devices=4", "model.name=lenet", "method.name=feddumap", "method.prune_round=1",
            "method.rate_nodes=selected",
        ]  # fmt: skip
    return found


def run(name: str, settings: list[str]) -> str:
    """Train, and return the checksum; what a failed command said, if it failed."""
    sets = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        commands = [[*COMMAND, "train", *sets, "--out", str(folder)]]
        if name.endswith("flower"):
            federation = Path(temporary) / "federation"
            commands = [
                [*COMMAND, "flower", "init", str(federation), *sets],
                [*COMMAND, "flower", "up", str(federation)],
            ]
            folder = federation / "run"
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
        return checksum(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--flower", action="store_true")
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(file.read_text()) for file in options.files)
        differing = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
        for name in differing:
            print(f"{name}: {before.get(name)} before, {after.get(name)} after")
        print(f"{len(before)} runs before, {len(after)} after, {len(differing)} differ")
        sys.exit(bool(differing))
    (file,) = options.files
    known = json.loads(file.read_text()) if file.exists() else {}
    for name, settings in cases(flower=options.flower).items():
        if name not in known:
            known[name] = run(name, settings)
            print(f"{known[name]}  {name}", flush=True)
            file.write_text(json.dumps(known, indent=2))


if __name__ == "__main__":
    main()
