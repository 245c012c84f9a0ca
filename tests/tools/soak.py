"""Kills runs at random moments, resumes them, and compares the results with those of undisturbed runs.

    python tests/tools/soak.py --kills 200 --minutes 15

Every run is killed again and again, by SIGKILL at a random moment after its start, until it has finished once
between two kills. The moments come from `--seed`; what a process does then depends on the machine. Methods
with and without device states, one and two workers take turns. Exit code 1 if a run differs or cannot be
resumed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from checksums import checksum  # noqa: E402

COMMAND = [sys.executable, "-m", "feddumap"]
SETTINGS = ["data.devices=8", "model.name=lenet", "train.rounds=30", "train.cohort=4", "train.epochs=2"]
SETTINGS += ["train.batch=32", "train.lr=0.05"]
KINDS = {
    "fedavg, 1 worker": ["method.name=fedavg", "run.workers=1"],
    "scaffold, 2 workers": ["method.name=scaffold", "run.workers=2"],
    "feddumap, 2 workers": ["method.name=feddumap", "method.prune_round=3", "run.workers=2"],
    "scaffold, 1 worker": ["method.name=scaffold", "run.workers=1", "run.checkpoint_every=4"],
}


def train(kind: str, out: Path) -> list[str]:
    """The command that begins or continues a run, as a user would type it."""
    if (out / "config.toml").is_file():
        return [*COMMAND, "resume", str(out)]
    sets = [part for setting in [*SETTINGS, *KINDS[kind]] for part in ("--set", setting)]
    return [*COMMAND, "train", *sets, "--out", str(out)]


def disturbed(kind: str, out: Path, moments: random.Random, seconds: float, kills: int, until: float) -> int:
    """Train a run to its end in spite of at most so many kills; returns how many there were."""
    done = 0
    while True:
        last = done >= kills or time.monotonic() >= until
        process = subprocess.Popen(
            train(kind, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            _, errors = process.communicate(timeout=None if last else moments.uniform(0.2, 1.2) * seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            done += 1
            continue
        if process.returncode:
            raise RuntimeError(f"{kind}, after {done} kills: exit code {process.returncode}: {errors.strip()}")
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    moments, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    kills = runs = differences = 0
    with tempfile.TemporaryDirectory() as folder:
        expected: dict[str, tuple[str, float]] = {}
        while kills < options.kills and time.monotonic() < until:
            kind = list(KINDS)[runs % len(KINDS)]
            if kind not in expected:
                began = time.monotonic()
                disturbed(kind, Path(folder, f"whole-{kind[:8]}-{len(expected)}"), moments, 1.0, 0, until)
                whole = checksum(Path(folder, f"whole-{kind[:8]}-{len(expected)}"))
                expected[kind] = whole, time.monotonic() - began
            out = Path(folder, f"run-{runs}")
            try:
                kills += disturbed(kind, out, moments, expected[kind][1], options.kills - kills, until)
                differs = checksum(out) != expected[kind][0] or list(out.rglob("*.tmp")) != []
            except RuntimeError as error:
                print(error, flush=True)
                differs = True
            differences += differs
            runs += 1
            print(f"{kills} kills, {runs} runs, {differences} differences", flush=True)
    print(f"seed {options.seed}: {kills} kills in {runs} runs, {differences} differences")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
