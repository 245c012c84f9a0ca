"""`make fuzz`: feeds every reader with altered inputs for a while and prints what came of it.

Each target runs in a process of its own, so that a crash, a hang or too much memory is found and named. A
half of the time is for mutations of valid inputs, a half for atheris (coverage-guided), if it is installed.
Findings are written to --out, one file each, and make the exit code 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

HANG = 20  # seconds for an input
MEMORY = 3 << 30  # bytes of a process above what it has when it begins


class HangError(Exception):
    """An input took too long."""


def child(name: str, seconds: float, guided: bool, seed: int, out: Path) -> None:
    """Fuzz one target in this process; prints a line of JSON."""
    if guided:
        import atheris

        with atheris.instrument_imports(include=["feddumap"]):
            from tests.fuzz.targets import TARGETS
    else:
        from tests.fuzz.targets import TARGETS
    from feddumap.errors import FeddumapError, escape_controls

    target, seeds = TARGETS[name]
    tried = 0
    state = {"tracebacks": 0, "hangs": 0, "refused": 0}
    faulthandler.enable()

    def report() -> None:
        most = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        print("RESULT " + json.dumps({"inputs": tried, "memory_mb": most, **state}), flush=True)

    def keep(data: bytes, kind: str, text: str) -> None:
        state[kind] += 1
        out.mkdir(parents=True, exist_ok=True)
        stem = f"{name}-{kind}-{state[kind]}"
        if state[kind] <= 20:
            (out / f"{stem}.bin").write_bytes(data)
            (out / f"{stem}.txt").write_text(text)

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise HangError

    signal.signal(signal.SIGALRM, stop)

    def one(data: bytes) -> None:
        nonlocal tried
        tried += 1
        signal.alarm(HANG)
        try:
            target(data)
        except FeddumapError as error:
            state["refused"] += 1
            if escape_controls(str(error)) != str(error):
                keep(data, "tracebacks", f"an error that is not printable: {str(error)!r}")
        except HangError:
            keep(data, "hangs", traceback.format_exc())
        except Exception:
            keep(data, "tracebacks", traceback.format_exc())
        finally:
            signal.alarm(0)

    for data in seeds:
        one(data)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, pages + MEMORY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    until = time.monotonic() + seconds
    if guided:

        def until_the_end(data: bytes) -> None:
            if time.monotonic() > until:  # libFuzzer itself ends without Python's exit handlers
                report()
                os._exit(0)
            one(data)

        _guide(until_the_end, seeds, out / f"corpus-{name}")
    else:
        from tests.fuzz.mutations import inputs

        for data in inputs(seeds, seed):
            if time.monotonic() > until:
                break
            (out / f"{name}.last").write_bytes(data)  # what to look at after a crash
            one(data)
        report()


def _guide(one: Callable[[bytes], None], seeds: list[bytes], corpus: Path) -> None:
    import atheris

    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], str(corpus), "-rss_limit_mb=8000", "-verbosity=0", "-max_len=16384"], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="for all targets together")
    parser.add_argument("--targets", nargs="*", help="default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--child")
    parser.add_argument("--guided", action="store_true")
    given = parser.parse_args()
    if given.child:
        child(given.child, given.seconds, given.guided, given.seed, given.out)
        return
    from tests.fuzz.targets import TARGETS

    given.out.mkdir(parents=True, exist_ok=True)
    try:
        import atheris as atheris

        ways = (False, True)
    except ImportError:
        print("atheris is not installed (pip install 'feddumap[fuzz]'): mutations only")
        ways = (False,)
    chosen = given.targets or list(TARGETS)
    share = given.seconds / (len(chosen) * len(ways))
    rows = [_row(name, guided, share, given) for name in chosen for guided in ways]
    total = {
        key: sum(row[key] for row in rows) for key in ("inputs", "refused", "tracebacks", "hangs", "crashes")
    }
    print(json.dumps({**total, "memory_mb": max(row["memory_mb"] for row in rows)}))
    sys.exit(1 if total["tracebacks"] + total["hangs"] + total["crashes"] else 0)


def _row(name: str, guided: bool, seconds: float, given: argparse.Namespace) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.fuzz.run", "--child", name, "--seconds", str(seconds)]
    command += ["--seed", str(given.seed), "--out", str(given.out), *(["--guided"] if guided else [])]
    row = {"inputs": 0, "refused": 0, "tracebacks": 0, "hangs": 0, "crashes": 0, "memory_mb": 0}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 180, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        row |= json.loads(lines[-1].removeprefix("RESULT ")) if lines else {}
        row["crashes"] = int(done.returncode != 0 or not lines)
        log = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        row["hangs"], log = 1, str(error)
    if row["crashes"] or row["hangs"]:
        (given.out / f"{name}-{'atheris' if guided else 'mutations'}.log").write_text(log)
    way = "atheris" if guided else "mutations"
    print(f"{name:12} {way:10} " + " ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
