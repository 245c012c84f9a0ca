"""Federated learning with shareable server data.

    import feddumap

    run = feddumap.train({"model": {"name": "lenet"}, "train": {"rounds": 20}}, out="runs/first")
    print(run.summary)

Names are loaded when first used, so that `import feddumap` is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddumap.config import Config
    from feddumap.errors import FeddumapError
    from feddumap.run import Run, resume, start, train

__version__ = "0.1.0"

_HOMES = {
    "Config": "feddumap.config",
    "FeddumapError": "feddumap.errors",
    "Run": "feddumap.run",
    "resume": "feddumap.run",
    "start": "feddumap.run",
    "train": "feddumap.run",
}

__all__ = ["Config", "FeddumapError", "Run", "__version__", "resume", "start", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'feddumap' has no attribute {name!r}")
