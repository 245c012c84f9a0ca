"""The app of the server: a ServerApp whose main function is this project's loop of rounds."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from feddumap import run as api
from feddumap.config import Config, load
from feddumap.device.holdings import SplitHoldings
from feddumap.errors import FeddumapError
from feddumap.flower.cohort import FlowerCohort
from feddumap.flower.device_keys import DeviceKeys
from feddumap.methods import compose
from feddumap.progress import follow, print_summary
from feddumap.run import Run
from feddumap.system import console


def server_app() -> ServerApp:
    """The app of the server. Its run configuration:

    config    path of a CONFIG.toml; without one, the defaults
    sets      settings on top of it, as after --set, with spaces between: "train.rounds=20 run.seed=1"
    out       the run directory; a run that it already holds is resumed
    devices   path of a table of the devices' public keys (`device_keys.py`); without one, a node is the
              device that it says it is
    """
    app = ServerApp()
    app.main()(_main)
    return app


def _main(grid: Grid, context: Context) -> None:
    try:
        run_app(grid, context.run_config)
    except FeddumapError as error:
        console.say(f"feddumap: {error}")
        raise


def run_app(grid: Grid, settings: Mapping[str, object]) -> None:
    """Train the run, or the rest of it, to its end."""
    config, out = read_settings(settings)
    keys = read_keys(settings)
    run = api.begin(config, out, console.say)
    try:
        if run.state.round:
            console.say(f"resuming after {run.state.round} of {run.rounds} rounds")
        run.engine = partial(cohort, grid, keys=keys)
        follow(run)
        print_summary(run.summary)
        console.out.print(f"run directory: {out}", markup=False)
    finally:
        run.close()


def read_settings(settings: Mapping[str, object]) -> tuple[Config, Path]:
    """The configuration and the run directory that Flower's run configuration names."""
    path, out = str(settings.get("config", "")), str(settings.get("out", ""))
    if not out:
        raise FeddumapError("the run configuration has no out: expected the path of the run directory")
    config = load(Path(path) if path else None, shlex.split(str(settings.get("sets", ""))))
    return config.replace(run={"engine": "flower"}), Path(out)


def read_keys(settings: Mapping[str, object]) -> DeviceKeys | None:
    """The table of the devices' keys that Flower's run configuration names."""
    path = str(settings.get("devices", ""))
    if path:
        return DeviceKeys.read(Path(path))
    console.say(
        "devices are not bound to keys, since the run configuration names no table of them (devices = PATH): "
        "every node that the SuperLink admits may say that it is any device"
    )
    return None


def cohort(
    grid: Grid, run: Run, close: Callable[[], None] = lambda: None, keys: DeviceKeys | None = None
) -> FlowerCohort:
    """The cohort of a run's devices behind Flower's nodes; `close` is called when the run ends."""
    token = run.directory.token() if run.directory is not None else secrets.token_hex(16)
    holdings = SplitHoldings(run.dataset, run.split, run.config.run.seed)
    kind = FlowerCohort
    if run.config.run.secure:
        from feddumap.flower.secure_cohort import SecureCohort  # needs more of Flower

        kind = SecureCohort
    shared = compose(run.config).shared
    return kind(grid, run.config, token, holdings, shared, console.say, close, keys)
