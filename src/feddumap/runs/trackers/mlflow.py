"""MLflow: the numbers of the records, by round, and the configuration as parameters.

They go to MLFLOW_TRACKING_URI if it is set, and otherwise to files in the run directory. MLflow's run is
found again by a tag; rounds that it has are not logged again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from feddumap.config import Config
from feddumap.errors import FeddumapError
from feddumap.runs.directory import RunDirectory
from feddumap.runs.trackers.base import numbers

EXPERIMENT, TAG = "feddumap", "feddumap.run"
ALWAYS = "lr"  # a number that every record has


def require() -> Any:
    """The package; an error if it is not installed."""
    try:
        return import_module("mlflow")
    except ImportError as error:
        raise FeddumapError(
            f"run.mlflow = true needs the package mlflow, which cannot be imported here ({error}): "
            "pip install 'feddumap[mlflow]', or set it to false"
        ) from None


def start(directory: RunDirectory, config: Config, records: Sequence[Mapping[str, Any]]) -> Log:
    """The run at MLflow, with the records so far."""
    package = require()
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if not address:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow asks to be told
        address = (directory.path.resolve() / "mlflow").as_uri()
    log = Log(package, address, directory, config)
    for record in records:
        log.add(record)
    return log


class Log:
    """A run at MLflow."""

    def __init__(self, package: Any, address: str, directory: RunDirectory, config: Config) -> None:
        self._metric = import_module("mlflow.entities").Metric
        self._error: type[Exception] = import_module("mlflow.exceptions").MlflowException
        self._address, self._began = address, directory.began
        try:
            self._client = package.MlflowClient(tracking_uri=address)
            self._id, self._next = self._find(directory, config)
        except self._error as error:
            raise self._failure(error) from None

    def _find(self, directory: RunDirectory, config: Config) -> tuple[str, int]:
        """The identifier of MLflow's run, made if there is none, and the first round it does not have."""
        token, client = directory.token(), self._client
        experiment = client.get_experiment_by_name(EXPERIMENT)
        place = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
        found = client.search_runs([place], f"tags.`{TAG}` = '{token}'")
        if found:
            number = found[0].info.run_id
            client.update_run(number, status="RUNNING")
            return number, 1 + max(
                (each.step for each in client.get_metric_history(number, ALWAYS)), default=-1
            )
        began = int(1000 * self._began)
        made = client.create_run(place, began, {TAG: token}, run_name=directory.path.name).info.run_id
        for section, keys in config.to_toml().items():
            for key, value in keys.items():
                client.log_param(made, f"{section}.{key}", value)
        return made, 0

    def add(self, record: Mapping[str, Any]) -> None:
        number = record["round"]
        if number < self._next:
            return
        when = int(1000 * (self._began + record["wall"]))
        metrics = [self._metric(name, value, when, number) for name, value in numbers(record).items()]
        try:
            self._client.log_batch(self._id, metrics)
        except self._error as error:
            raise self._failure(error) from None

    def close(self) -> None:
        try:
            self._client.set_terminated(self._id)
        except self._error as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> FeddumapError:
        return FeddumapError(
            f"run.mlflow = true: MLflow cannot write to {self._address} ({' '.join(str(error).split())}): "
            "check MLFLOW_TRACKING_URI, or set run.mlflow to false"
        )
