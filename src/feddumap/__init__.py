"""Federated learning with shareable server data.

    import feddumap

    run = feddumap.Run(model="lenet", method="feddumap", devices=20, rounds=20, out="runs/first")
    for record in run:
        print(record.round, record.accuracy)

Names are loaded when first used, so that `import feddumap` is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddumap import methods
    from feddumap.config import Config
    from feddumap.core.algorithm import (
        Algorithm,
        Merged,
        Plan,
        RoundView,
        ServerStep,
        at_round,
        chain,
        every,
        mean_of_uploads,
    )
    from feddumap.core.messages import Upload
    from feddumap.core.record import Record
    from feddumap.core.tensors import weighted_mean
    from feddumap.data.in_memory import InMemoryDataset as Dataset
    from feddumap.engine.callbacks import EarlyStopping
    from feddumap.errors import FeddumapError
    from feddumap.methods.method import Method
    from feddumap.methods.registry import Settings, method
    from feddumap.methods.server_state import sending, zeros
    from feddumap.models.cost import parameter_names
    from feddumap.report.api import compare
    from feddumap.run import Run, resume, start, train
    from feddumap.training.optimizers import (
        UpdateRule,
        adam,
        corrected,
        frozen_momentum,
        masked,
        momentum,
        momentum_from,
        proximal,
        sgd,
        with_gradient_hook,
    )

__version__ = "0.1.0"

_MODULES = {
    "feddumap.config": ["Config"],
    "feddumap.errors": ["FeddumapError"],
    "feddumap.core.record": ["Record"],
    "feddumap.engine.callbacks": ["EarlyStopping"],
    "feddumap.report.api": ["compare"],
    "feddumap.run": ["Run", "resume", "start", "train"],
    # what methods are made of
    "feddumap.core.algorithm": [
        *("Algorithm", "Merged", "Plan", "RoundView", "ServerStep"),
        *("at_round", "chain", "every", "mean_of_uploads"),
    ],
    "feddumap.core.messages": ["Upload"],
    "feddumap.core.tensors": ["weighted_mean"],
    "feddumap.methods.method": ["Method"],
    "feddumap.methods.registry": ["Settings", "method"],
    "feddumap.methods.server_state": ["sending", "zeros"],
    "feddumap.models.cost": ["parameter_names"],
    "feddumap.training.optimizers": [
        *("UpdateRule", "sgd", "momentum", "adam", "proximal", "corrected"),
        *("momentum_from", "frozen_momentum", "masked", "with_gradient_hook"),
    ],
}
_HOMES = {name: home for home, names in _MODULES.items() for name in names}

__all__ = [
    "Algorithm",
    "Config",
    "Dataset",
    "EarlyStopping",
    "FeddumapError",
    "Merged",
    "Method",
    "Plan",
    "Record",
    "RoundView",
    "Run",
    "ServerStep",
    "Settings",
    "UpdateRule",
    "Upload",
    "__version__",
    "adam",
    "at_round",
    "chain",
    "compare",
    "corrected",
    "every",
    "frozen_momentum",
    "masked",
    "mean_of_uploads",
    "method",
    "methods",
    "momentum",
    "momentum_from",
    "parameter_names",
    "proximal",
    "resume",
    "sending",
    "sgd",
    "start",
    "train",
    "weighted_mean",
    "with_gradient_hook",
    "zeros",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "methods":
        return import_module("feddumap.methods")
    if name == "Dataset":  # which has another name inside, where data sets are files
        return import_module("feddumap.data.in_memory").InMemoryDataset
    raise AttributeError(f"module 'feddumap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
