"""Training from Python: `Run`; and `start`, `begin`, `resume` and `train`, on configurations alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from feddumap.config import RUNTIME_KEYS, Config
from feddumap.core.record import Record
from feddumap.engine import configured, objects
from feddumap.engine.callbacks import Callback
from feddumap.engine.configured import base_config
from feddumap.engine.resolution import complete as complete
from feddumap.engine.resolution import make_split, resolve
from feddumap.engine.session import Session
from feddumap.errors import FeddumapError
from feddumap.models.frozen import constants_of
from feddumap.runs.directory import RunDirectory, require_trust, sign_code
from feddumap.runs.existing import contains_run
from feddumap.runs.reader import legacy_stack_size, read_config
from feddumap.system.callbacks import Say, ignore, to_stderr

if TYPE_CHECKING:
    from pandas import DataFrame

Given = Config | Mapping[str, Any] | str | Path | None
"""A configuration: a `Config`, a nested dictionary, the path of a TOML file, or None for the defaults."""

_open: WeakValueDictionary[Path, Run] = WeakValueDictionary()
"""The open runs of this process by their directories."""


class Run(Session):
    """A training run. Iterating over it trains the rounds that are left and yields their records.

    `model` is a name, a factory (a function or class that is called with the number of classes) or a network;
    `data` a name, a path or a `feddumap.Dataset`; `method` a name, a function that makes an `Algorithm`, or a
    value such as `feddumap.methods.feddumap(c=1.0)`. A name with settings is a mapping: `{"name": "fedprox",
    "mu": 0.1}`. `keys` are keys of the configuration by their own names (`devices=20, rounds=50, lr=0.05`) on
    top of `config`.

    With `out` the run is kept in that directory; if it is there already, it goes on from its last checkpoint,
    and `rounds` may be larger than before. `callbacks` are called with the run and the record after each
    round and stop it by returning True. `say` gets notes, by default on stderr.
    """

    def __init__(
        self,
        model: Any = None,
        data: Any = None,
        method: Any = None,
        *,
        out: str | Path | None = None,
        config: Given = None,
        callbacks: Iterable[Callback] = (),
        say: Say = to_stderr,
        **keys: Any,
    ) -> None:
        full = configured.configure(base_config(config), model, data, method, keys)
        if out is not None and (earlier := _open.pop(Path(out).resolve(), None)) is not None:
            earlier.close()  # a notebook's cell was run again
        self._begin(full, out, say)
        self.callbacks = tuple(callbacks)
        if out is not None:
            _open[Path(out).resolve()] = self

    def _begin(self, config: Config, out: str | Path | None, say: Say) -> None:
        """Start a run or, if `out` contains it already, resume it from its last checkpoint."""
        if out is None:
            self._start(config, out, say)
            return
        resolved, _ = resolve(config, ignore)
        extended = _extended(resolved, out)
        if not contains_run(Path(out), extended):
            self._start(resolved, out, say)
            return
        rounds = resolved.train.rounds if extended is not resolved else None
        runtime = {key: getattr(resolved.run, key) for key in RUNTIME_KEYS}
        self._resume(out, say, runtime, rounds, resolved)

    def _start(self, config: Config, out: str | Path | None, say: Say) -> None:
        """Prepare a new run. Everything is checked before `out` is created."""
        resolved, dataset = resolve(config, say)
        super().__init__(resolved, dataset, make_split(resolved, dataset, say), say=say)
        self.check()
        if self.rounds < resolved.train.rounds:
            say(f"{resolved.method.name} has a single round with all {resolved.data.devices} devices")
        if out is not None:
            copied = resolved.model.weights is not None or configured.is_object(resolved.model.name)
            everything = {**self.state.weights, **constants_of(self.state.architecture)}
            weights = everything if copied else None
            self.directory = RunDirectory.create(Path(out), resolved, self.split, weights)
            _sign(self.directory.path, resolved, say)
            self.out = self.directory.path

    def _resume(
        self,
        directory: str | Path,
        say: Say,
        runtime: Mapping[str, Any],
        rounds: int | None,
        given: Config | None = None,
        trust: bool = False,
    ) -> None:
        """Open a run at its last checkpoint. `given` has the names of what was passed as objects. Code that
        the directory names is imported if the caller gave the names, or if it is trusted."""
        if given is None:
            require_trust(Path(directory), trust, "resuming")
        opened = RunDirectory.open(Path(directory))
        try:
            config = before = opened.config()
            if (stack := legacy_stack_size(opened.path)) > 1:
                say(
                    f"this run trained {stack} devices together (train.stack), which is no longer supported: "
                    "they now train separately, and results differ from an uninterrupted run by rounding"
                )
            if given is None:
                objects.require_none(config)
            else:
                config = config.replace(model={"name": given.model.name}, method={"name": given.method.name})
            config = config.replace(run={key: value for key, value in runtime.items() if value is not None})
            if rounds is not None:
                config = config.replace(train={"rounds": rounds})
            config, dataset = resolve(config, say)
            super().__init__(config, dataset, opened.split(len(dataset.train_labels)), opened, say)
            self.restore(say)
            if rounds is not None and rounds < self.state.round:
                raise FeddumapError(
                    f"--rounds {rounds}: {directory} has {self.state.round} rounds already: give a larger "
                    "number"
                )
            after = config.replace(run={"workers": before.run.workers})
            if rounds is not None or after.run != before.run:
                opened.set_config(config)
        except BaseException:
            opened.close()
            raise

    def run(self, on_round: Callable[[Record], None] | None = None) -> Run:
        """Train to the end."""
        for record in self:
            if on_round is not None:
                on_round(record)
        return self

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def frame(self) -> DataFrame:
        """The records as a pandas table, a row per round."""
        from feddumap.report import notebook

        return notebook.frame([notebook.flat(record) for record in self.records])

    def report(self, out: str | Path = "report", figures: bool = True) -> Path:
        """Write the HTML page about this run, and its figures; returns the path of the page."""
        from feddumap.report.api import compare

        return compare([self]).report(out, figures)

    def __repr__(self) -> str:
        names = (self.config.method.name, self.config.model.name, self.config.data.name)
        return f"<Run of {', '.join(names)}: {self.state.round} of {self.rounds} rounds>"

    def _repr_html_(self) -> str:
        from feddumap.report import notebook

        return notebook.run_html(self.summary, self.records, self.rounds)


def _sign(path: Path, config: Config, say: Say) -> None:
    try:
        sign_code(path, config)
    except OSError as error:
        say(
            f"the code that this run names cannot be signed ({error}): `feddumap resume {path}` will need "
            "--trust"
        )


def _extended(config: Config, out: str | Path) -> Config:
    """The configuration with the rounds of the run in `out`, if it has fewer; else the configuration."""
    if not (Path(out) / "config.toml").is_file():
        return config
    before = read_config(Path(out)).train.rounds
    return config.replace(train={"rounds": before}) if before < config.train.rounds else config


def start(config: Given = None, out: str | Path | None = None, say: Say = ignore) -> Run:
    """Prepare a run without training. Everything is checked before `out` is created."""
    run = Run.__new__(Run)
    run._start(base_config(config), out, say)
    return run


def begin(config: Given, out: str | Path, say: Say = ignore) -> Run:
    """Start a run or, if `out` contains it already, resume it from its last checkpoint; `train.rounds` may be
    larger than before."""
    resolved, _ = resolve(base_config(config), ignore)
    extended = _extended(resolved, out)
    if not contains_run(Path(out), extended):
        return start(resolved, out, say)
    rounds = resolved.train.rounds if extended is not resolved else None
    runtime = {key: getattr(resolved.run, key) for key in RUNTIME_KEYS}
    # trusted, since the configuration names the code
    return resume(out, rounds=rounds, say=say, runtime=runtime, trust=True)


def train(
    config: Given = None,
    out: str | Path | None = None,
    on_round: Callable[[Record], None] | None = None,
) -> Run:
    """Train to the end and return the run, which is also written to the directory `out` if given."""
    with start(config, out) as run:
        return run.run(on_round)


def resume(
    directory: str | Path,
    workers: int | None = None,
    rounds: int | None = None,
    say: Say = ignore,
    tensorboard: bool | None = None,
    runtime: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Run:
    """Open an interrupted run at its last checkpoint; iterate over it or call `.run()` to continue.

    Only `workers`, `tensorboard`, the other `RUNTIME_KEYS` of [run] (by `runtime`) and a larger number of
    `rounds` may differ from before. Code that the directory names (`module:function`) is imported if this
    user made the directory, or with `trust`.
    """
    run = Run.__new__(Run)
    changes = {"workers": workers, "tensorboard": tensorboard, **(runtime or {})}
    run._resume(directory, say, changes, rounds, trust=trust)
    return run
