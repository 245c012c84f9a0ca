"""Export trained models: `write` makes a file for other programs, `load` reads a safetensors export.

    from feddumap import export

    export.write("runs/first", "onnx")              # runs/first/model.onnx, compared with the model
    export.write("runs/first", "safetensors", "my.safetensors")
    network, metadata = export.load("my.safetensors")   # a torch module and its description

Heavy dependencies are imported on first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from feddumap.system.callbacks import Say, ignore

if TYPE_CHECKING:
    from torch import nn

    from feddumap.export.metadata import Metadata
    from feddumap.export.writer import ExportResult

__all__ = ["load", "write"]


def write(
    directory: str | Path,
    to: str,
    out: str | Path | None = None,
    force: bool = False,
    say: Say = ignore,
    trust: bool = False,
) -> ExportResult:
    """Write the model of a run's newest valid checkpoint to `out`; default DIRECTORY/model.SUFFIX.

    `to` is onnx, safetensors or executorch. The file is loaded with its own runtime and its outputs are
    compared with the model's before it is renamed to `out`. An existing file is an error unless `force`.
    Code that the directory names is imported if this user made the directory, or with `trust`.
    """
    from feddumap.export import writer

    return writer.write(Path(directory), to, Path(out) if out is not None else None, force, say, trust)


def load(path: str | Path) -> tuple[nn.Module, Metadata]:
    """The network of a safetensors export, in eval mode, and the file's metadata."""
    from feddumap.export import formats

    return formats.load(Path(path))
