"""`feddumap export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddumap.cli.options import RunDirectory, Trust


def export(
    directory: RunDirectory,
    to: Annotated[str, typer.Option("--to", help="onnx, safetensors or executorch.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Default DIR/model.SUFFIX, such as DIR/model.onnx."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    trust: Trust = False,
) -> None:
    """Export a run's model to a file.

    It is verified that the file's outputs equal the model's.
    """
    from feddumap.export import write
    from feddumap.system import console

    written = write(directory, to, out, force, console.say, trust)
    metadata = written.metadata
    test = f"{written.test} test images and " if written.test else ""
    console.out.print(
        f"{written.path}: {metadata.run['model']} after {console.plural(metadata.run['rounds'], 'round')}, "
        f"{metadata.run['parameters']:,} parameters, {len(metadata.classes)} classes, "
        f"{console.byte_size(written.path.stat().st_size)}\n"
        f"compared with the model on {test}{written.random} random images: largest difference "
        f"{written.difference:.2g}, largest output {written.largest:.3g}",
        markup=False,
    )
