"""Flower's simulation with Ray as the engine of a run in this process."""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
from pathlib import Path

from flwr.app import ConfigRecordValues, Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from feddumap.errors import FeddumapError
from feddumap.flower import server
from feddumap.flower.client import client_app
from feddumap.flower.cohort import FlowerCohort
from feddumap.run import Run
from feddumap.system.determinism import cores

CLUSTER = "RAY_ADDRESS"  # the variable that makes Ray join a cluster, which has its own number of cores
POLL = 0.5  # seconds between two checks whether the simulation has started


def simulated(run: Run) -> FlowerCohort:
    """The devices of a run as nodes of Flower's simulation, one core each, on this machine or on the cluster
    that RAY_ADDRESS names. Their state is in the run directory or, without one, in a temporary folder."""
    temporary = None if run.directory is not None else tempfile.TemporaryDirectory(prefix="feddumap-nodes-")
    state = (
        run.directory.path / "nodes" if run.directory is not None else Path(str(temporary and temporary.name))
    )
    simulation = Simulation(run.config.data.devices, run.config.run.workers or cores(), state.absolute())

    def close() -> None:
        simulation.close()
        if temporary is not None:
            temporary.cleanup()

    try:
        return server.cohort(simulation.grid(), run, close)
    except BaseException:
        close()
        raise


class Simulation:
    """Flower's simulation in a thread, while its grid is in use. The main thread trains, so progress, Ctrl-C
    and errors work as with other engines."""

    def __init__(self, devices: int, workers: int, state: Path) -> None:
        self._over = threading.Event()
        self._grids: queue.SimpleQueue[Grid] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._level = logging.getLogger("flwr").level
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self._thread = threading.Thread(
            target=self._simulate, args=(devices, workers, state), name="feddumap-flower", daemon=True
        )
        self._thread.start()

    def grid(self) -> Grid:
        """Wait for Flower's grid."""
        while True:
            try:
                return self._grids.get(timeout=POLL)
            except queue.Empty:
                if not self._thread.is_alive():
                    raise FeddumapError(
                        f"Flower's simulation did not start ({self._failure}): see above, or use "
                        "run.engine = 'local'"
                    ) from self._failure

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        logging.getLogger("flwr").setLevel(self._level)

    def _simulate(self, devices: int, workers: int, state: Path) -> None:
        app = ServerApp()
        app.main()(self._lend)
        init: dict[str, ConfigRecordValues] = {"logging_level": "error", "log_to_driver": False}
        if not os.environ.get(CLUSTER):
            init |= {"num_cpus": workers, "include_dashboard": False}
        backend: dict[str, dict[str, ConfigRecordValues]] = {
            "init_args": init,
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        }
        try:
            # these devices are the user's own, who has named the code to run
            run_simulation(app, client_app(state, modules=True), devices, backend_config=backend)
        except BaseException as error:
            self._failure = error

    def _lend(self, grid: Grid, context: Context) -> None:
        self._grids.put(grid)
        self._over.wait()
