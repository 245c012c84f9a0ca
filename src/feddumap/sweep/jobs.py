"""Train the cells of a grid: sequentially in this process, or in parallel in child processes.

A child process reads its cell as one JSON line. It stops at a checkpoint when its standard input closes,
which happens when the grid is interrupted or its process exits for any reason.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

from feddumap import run as api
from feddumap.config import RUNTIME_KEYS, Config
from feddumap.errors import FeddumapError
from feddumap.sweep.grid import Cell
from feddumap.system import children
from feddumap.system.determinism import cores

TICK = 1.0  # seconds between progress updates
GRACE = 20.0  # seconds that a child has to save its checkpoint after the grid exits


def processes_of(config: Config, jobs: int = 1) -> int:
    """The number of processes that train one cell: as configured with one job, else a share of the cores."""
    return max(1, cores() // jobs) if jobs > 1 else config.run.workers or min(cores(), config.train.cohort)


def train_cells(
    cells: Sequence[Cell],
    jobs: int,
    tick: Callable[[], None],
    ended: Callable[[Cell, str | None], None],
) -> None:
    """Train cells, `jobs` at a time. `ended` is called with each cell and an error message or None; `tick` is
    called periodically."""
    if jobs == 1:
        for cell in cells:
            ended(cell, train_cell(cell.path, cell.config, tick))
        return
    with ThreadPoolExecutor(jobs) as threads, CellProcesses() as processes:
        futures: dict[Future[str | None], Cell] = {
            threads.submit(processes.run, cell.path, _with_worker_share(cell.config, jobs)): cell
            for cell in cells
        }
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, TICK, FIRST_COMPLETED)
            for future in done:
                ended(futures[future], future.result())
            tick()


def _with_worker_share(config: Config, jobs: int) -> Config:
    return config.replace(run={"workers": processes_of(config, jobs)})


def train_cell(path: Path, config: Config, tick: Callable[[], None] = lambda: None) -> str | None:
    """Start or resume one cell in this process; returns an error message or None."""
    try:
        if (path / "config.toml").is_file():
            runtime = {key: getattr(config.run, key) for key in RUNTIME_KEYS}
            run = api.resume(path, runtime=runtime)
        else:
            run = api.start(config, path)
        try:
            with closing(cast("Generator[dict[str, Any], None, None]", run.iterate())) as records:
                for _ in records:
                    tick()
        finally:
            run.close()
    except FeddumapError as error:
        reason = str(error)
    except OSError as error:
        reason = f"cannot write or read {error.filename or path}: {error.strerror or error}"
    except Exception as error:  # an unexpected error in one cell must not stop the others
        reason = f"{type(error).__name__}: {error}; for a traceback run `feddumap resume {path}`"
    else:
        return None
    return " ".join(reason.split())


class CellProcesses:
    """Child processes that train one cell each; they are stopped when the context exits."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def __enter__(self) -> CellProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopping = True
            for process in self._running:
                assert process.stdin is not None
                with suppress(OSError):
                    process.stdin.close()

    def run(self, path: Path, config: Config) -> str | None:
        """Train one cell in a child process and wait for it; returns an error message or None."""
        try:
            with self._lock:
                if self._stopping:
                    return None
                process = children.start("feddumap.sweep.jobs", stderr=subprocess.STDOUT)
                self._running.add(process)
                assert process.stdin is not None
                process.stdin.write(json.dumps({"path": str(path), "config": config.model_dump()}) + "\n")
                process.stdin.flush()
            with process:
                assert process.stdout is not None
                said = process.stdout.read().strip().splitlines()
                code = process.wait()
                with self._lock:
                    self._running.discard(process)
        except OSError as error:
            return f"its process could not be started ({error.strerror or error}): lower --jobs"
        if code < 0:
            return f"its process was killed by signal {-code}, possibly out of memory: lower --jobs"
        return (said or [f"its process exited with code {code}"])[-1] if code else None


def main() -> None:
    """Entry point of a child process of `CellProcesses`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    job = json.loads(sys.stdin.readline())
    children.exit_with_parent(GRACE)
    try:
        error = train_cell(Path(job["path"]), Config.parse(job["config"]))
    except KeyboardInterrupt:
        sys.exit(130)
    if error:
        print(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
