"""Kills runs at random moments, resumes them, and compares the results with those of undisturbed runs.

    python tests/tools/soak.py --kills 200 --minutes 15

Every run is killed again and again, by SIGKILL at a random moment after its start, until it has finished once
before the next kill. The moments come from `--seed`; what a process does then depends on the machine. Methods
with and without device states, one and two workers take turns. Each attempt is a process of its own, forked
from this one to save the time of its imports. Exit code 1 if a run differs or cannot be resumed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from tests.support.faults import outcome

from feddumap import run as api
from feddumap.config import Config
from feddumap.engine import forkserver
from feddumap.runs.verify import Verification

BASE = {
    "data": {"devices": 8},
    "model": {"name": "lenet"},
    "train": {"rounds": 20, "cohort": 4, "epochs": 1, "batch": 32, "lr": 0.05},
}
PRUNING = {"name": "feddumap", "prune_round": 3, "rate": "fixed", "fixed_rate": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "fedavg, 1 worker": {"method": {"name": "fedavg"}, "run": {"workers": 1}},
    "scaffold, 2 workers": {"method": {"name": "scaffold"}, "run": {"workers": 2}},
    "feddumap, 2 workers": {"method": PRUNING, "run": {"workers": 2}},
    "scaffold, 1 worker": {"method": {"name": "scaffold"}, "run": {"workers": 1, "checkpoint_every": 4}},
}


def begin(config: Config, out: Path) -> int:
    """Begin or continue a run in a new process; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if config.run.workers > 1:
            forkserver._shared = forkserver.ForkServer(forked=True)
        with api.begin(config, out) as run:
            run.run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def ended(pid: int, until: float | None) -> int | None:
    """The exit code of a process; None if it has not ended at that time."""
    while until is not None and time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None if until is not None else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def disturbed(config: Config, out: Path, moments: random.Random, seconds: float, kills: int) -> int:
    """Train a run to its end in spite of at most so many kills; returns how many there were, or raises."""
    done = 0
    while True:
        last = done >= kills
        pid = begin(config, out)
        code = ended(pid, None if last else time.monotonic() + moments.uniform(0.0, 0.7) * seconds)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            done += 1
        elif code:
            raise RuntimeError(f"{out}: exit code {code} after {done} kills")
        else:
            return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    moments, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    kills = runs = differences = 0
    expected: dict[str, tuple[Any, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while kills < options.kills and time.monotonic() < until:
            kind = list(KINDS)[runs % len(KINDS)]
            config = Config.parse({**BASE, **KINDS[kind]})
            if kind not in expected:
                began, whole = time.monotonic(), Path(folder, f"whole-{len(expected)}")
                disturbed(config, whole, moments, 0.0, kills=0)
                expected[kind] = outcome(whole), time.monotonic() - began
            out = Path(folder, f"run-{runs}")
            try:
                kills += disturbed(config, out, moments, expected[kind][1], min(20, options.kills - kills))
                sound = all(found.state == "ok" for found in Verification(out, repair=False).run())
                differences += outcome(out) != expected[kind][0] or not sound
            except RuntimeError as error:
                print(error, flush=True)
                differences += 1
            runs += 1
            print(f"{kind}: {kills} kills, {runs} runs, {differences} differences", flush=True)
    print(f"seed {options.seed}: {kills} kills in {runs} runs, {differences} differences")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
