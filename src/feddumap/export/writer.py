"""Writing an export: the file is written, read back and verified under a temporary name, then renamed."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from feddumap.core.rng import torch_stream
from feddumap.errors import FeddumapError, unknown
from feddumap.export import checkpoint
from feddumap.export.checkpoint import TrainedModel
from feddumap.export.formats import FORMATS, Format, Predict
from feddumap.export.metadata import Metadata
from feddumap.runs.directory import require_trust
from feddumap.system.atomic_files import atomic_replacement
from feddumap.system.callbacks import Say
from feddumap.training.samples import to_input

BATCHES = (1, 2, 7)  # sizes of the batches of random images
TOLERANCE = 1e-4  # relative to the largest output, or to 1 if that is smaller


@dataclass(frozen=True)
class ExportResult:
    """The exported file, its metadata, the numbers of random and test images it was verified on, and the
    largest absolute difference and the largest absolute output there."""

    path: Path
    metadata: Metadata
    random: int
    test: int
    difference: float
    largest: float


def write(
    directory: Path, to: str, out: Path | None, force: bool, say: Say, trust: bool = False
) -> ExportResult:
    """`feddumap.export.write`: arguments are checked before the model is converted."""
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    form = FORMATS[to]
    _require_packages(to, form)
    path = out or directory / f"model.{form.suffix}"
    require_trust(directory, trust, "exporting")
    trained = checkpoint.read(directory, say)
    _check_path(path, force)
    trained = replace(trained, metadata=replace(trained.metadata, batch=form.batch))
    data = _encoded(to, form, trained)
    with atomic_replacement(path) as neighbour:
        neighbour.write_bytes(data)
        difference, largest = _compare(to, form, neighbour, trained)
    random = sum(len(batch) for batch in _random_batches(form, trained))
    return ExportResult(path, trained.metadata, random, len(trained.inputs), difference, largest)


def _require_packages(to: str, form: Format) -> None:
    for package in form.packages:
        try:
            import_module(package)
        except ImportError as error:
            raise FeddumapError(
                f"the format {to} needs the package {package}, which cannot be imported ({error}): "
                f"pip install {' '.join(form.packages)}"
            ) from None


def _check_path(path: Path, force: bool) -> None:
    if path.is_dir():
        raise FeddumapError(f"{path} is a folder: set --out to a file")
    if not path.parent.is_dir():
        raise FeddumapError(f"the folder {path.parent} does not exist: create it or choose another --out")
    if path.exists() and not force:
        raise FeddumapError(f"{path} exists: choose another --out, or overwrite it with --force")


def _encoded(to: str, form: Format, trained: TrainedModel) -> bytes:
    module = deepcopy(trained.network)
    for tensor in [*module.parameters(), *module.buffers()]:
        # training uses channels-last; files use the default memory format
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    try:
        return form.encode(module, trained.metadata)
    except Exception as error:  # a converter may raise anything for a user's network
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise FeddumapError(
            f"{trained.metadata.architecture.family} cannot be converted to {to} ({first}): choose another "
            "format"
        ) from error


@torch.inference_mode()
def _compare(to: str, form: Format, path: Path, trained: TrainedModel) -> tuple[float, float]:
    """The largest difference between the file's outputs and the model's, and the largest output."""
    predict, metadata = _load_back(to, form, path)
    if metadata != trained.metadata:
        raise FeddumapError(
            f"the metadata read back from the {to} file differs from what was written: choose another format"
        )
    differences, sizes = [0.0], [0.0]
    for inputs in [*_random_batches(form, trained), *_test_batches(form, trained)]:
        expected = trained.network(inputs)
        if not torch.isfinite(expected).all():
            raise FeddumapError(
                f"the model after {metadata.run['rounds']} rounds gives outputs that are not finite: "
                "training diverged; lower train.lr"
            )
        differences.append(_difference(to, predict, inputs, expected))
        sizes.append(float(expected.abs().max()))
    difference, largest = max(differences), max(sizes)
    allowed = TOLERANCE * max(1.0, largest)
    if difference > allowed:
        raise FeddumapError(
            f"the {to} file's outputs differ from the model's by {difference:.2g}, expected at most "
            f"{allowed:.2g}: nothing was written; choose another format"
        )
    return difference, largest


def _load_back(to: str, form: Format, path: Path) -> tuple[Predict, Metadata]:
    try:
        return form.decode(path)
    except Exception as error:  # a runtime may raise anything
        raise _unusable(to, error) from error


def _difference(to: str, predict: Predict, inputs: torch.Tensor, expected: torch.Tensor) -> float:
    try:
        outputs = predict(inputs)
    except Exception as error:  # a runtime may raise anything
        raise _unusable(to, error) from error
    if outputs.shape != expected.shape or not torch.isfinite(outputs).all():
        raise _unusable(to, f"outputs {tuple(outputs.shape)} for {len(inputs)} inputs, or not finite")
    return float((outputs - expected).abs().max())


def _unusable(to: str, reason: Exception | str) -> FeddumapError:
    first = (str(reason).splitlines() or [type(reason).__name__])[0]
    return FeddumapError(
        f"the {to} file cannot be used ({first}): nothing was written; choose another format"
    )


def _random_batches(form: Format, trained: TrainedModel) -> Iterator[torch.Tensor]:
    generator = torch_stream(0, "export")
    for size in BATCHES:
        inputs = trained.metadata.architecture.input.random(size, generator)
        yield from torch.split(inputs, form.batch or size)


def _test_batches(form: Format, trained: TrainedModel) -> Iterator[torch.Tensor]:
    if len(trained.inputs):
        inputs = to_input(trained.inputs).contiguous()
        yield from torch.split(inputs, form.batch or len(inputs))
