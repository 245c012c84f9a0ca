"""The command `feddumap export`: thin, it reads options and says what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")],
    to: Annotated[str, typer.Option("--to", help="onnx, torchscript, safetensors or executorch.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Default DIR/model.onnx, .pt and so on.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write a run's model as a file for other programs, and compare what they make of it with the model."""
    from feddumap.export import write
    from feddumap.system import console

    written = write(directory, to, out, force, console.say)
    card = written.card
    images = (
        f"{written.real} test images and {written.random} random ones"
        if written.real
        else (f"{written.random} random images")
    )
    console.out.print(
        f"{written.path}: {card.run['model']} after {card.run['rounds']} rounds, "
        f"{card.run['parameters']:,} parameters, {len(card.classes)} classes, "
        f"{written.path.stat().st_size / 1e6:.2f} MB\n"
        f"compared with the model on {images}: the largest difference is {written.difference:.2g} "
        f"in outputs up to {written.largest:.3g}",
        markup=False,
    )
