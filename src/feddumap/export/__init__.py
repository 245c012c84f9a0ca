"""Take a trained model away: `write` makes a file for other programs, `load` reads one back.

    from feddumap import export

    export.write("runs/first", "onnx")              # runs/first/model.onnx, compared with the model
    export.write("runs/first", "safetensors", "my.safetensors")
    network, card = export.load("my.safetensors")   # a torch module, and what it is

What is heavy is loaded when first used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

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
    say: Callable[[str], None] = lambda _: None,
) -> ExportResult:
    """Write the model of a run's newest good checkpoint as `out`; default DIRECTORY/model.SUFFIX.

    `to` is onnx, torchscript, safetensors or executorch. The file is loaded again with its own runtime and
    compared with the model before it gets its name. One that exists is replaced only by `force`.
    """
    from feddumap.export import writer

    return writer.write(Path(directory), to, Path(out) if out is not None else None, force, say)


def load(path: str | Path) -> tuple[nn.Module, Metadata]:
    """The network of a safetensors export, in eval mode, and what the file says about it."""
    from feddumap.export import formats

    return formats.load(Path(path))
