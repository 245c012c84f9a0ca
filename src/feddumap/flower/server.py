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
from feddumap.methods import compose
from feddumap.progress import follow, print_summary
from feddumap.run import Run
from feddumap.system import console


def server_app() -> ServerApp:
    """The app of the server. Its run configuration:

    config    path of a CONFIG.toml; without one, the defaults
    sets      settings on top of it, as after --set, with spaces between: "train.rounds=20 run.seed=1"
    out       the run directory; a run that it already holds is resumed
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
    run = api.begin(config, out, console.say)
    try:
        if run.state.round:
            console.say(f"resuming after {run.state.round} of {run.rounds} rounds")
        run.engine = partial(cohort, grid)
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


def cohort(grid: Grid, run: Run, close: Callable[[], None] = lambda: None) -> FlowerCohort:
    """The cohort of a run's devices behind Flower's nodes; `close` is called when the run ends."""
    token = run.directory.token() if run.directory is not None else secrets.token_hex(16)
    holdings = SplitHoldings(run.dataset, run.split, run.config.run.seed)
    kind = FlowerCohort
    if run.config.run.secure:
        from feddumap.flower.secure_cohort import SecureCohort  # needs more of Flower

        kind = SecureCohort
    return kind(grid, run.config, token, holdings, compose(run.config).shared, console.say, close)
