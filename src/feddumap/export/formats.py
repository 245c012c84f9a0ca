"""The formats: how a network becomes the bytes of a file, and how the file's own runtime reads it."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensor_bytes
from torch import nn

from feddumap.core.messages import Tensors
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError
from feddumap.export.metadata import INPUT, KEY, OUTPUT, Metadata
from feddumap.models import INPUT_SHAPE, network

Predict = Callable[[torch.Tensor], torch.Tensor]
JSON_FILE = f"{KEY}.json"


@dataclass(frozen=True)
class Format:
    """`encode` makes a file's bytes; `decode` reads the file back as a function and its card.

    `packages` must be installed; `batch` is the number of images a file takes at a time, None is any.
    """

    suffix: str
    encode: Callable[[nn.Module, Metadata], bytes]
    decode: Callable[[Path], tuple[Predict, Metadata]]
    packages: tuple[str, ...] = ()
    batch: int | None = None


def _example(batch: int) -> torch.Tensor:
    return torch.zeros(batch, *INPUT_SHAPE[1:])


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters tell of packages they do not need and of interfaces that will change one day."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ONNX, read by onnxruntime


def _to_onnx(module: nn.Module, card: Metadata) -> bytes:
    batch = torch.export.Dim("batch")
    with _quiet():
        program = torch.onnx.export(
            module,
            (_example(2),),
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: batch},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    graph = proto.graph
    for part in [*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph]:
        del part.metadata_props[:]  # where in the source it came from, with this machine's paths
    entry = proto.metadata_props.add()
    entry.key, entry.value = KEY, card.to_json()
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def _from_onnx(path: Path) -> tuple[Predict, Metadata]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def predict(images: torch.Tensor) -> torch.Tensor:
        (logits,) = session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(logits)

    return predict, Metadata.from_json(session.get_modelmeta().custom_metadata_map[KEY])


# TorchScript, read by torch


def _to_torchscript(module: nn.Module, card: Metadata) -> bytes:
    buffer = io.BytesIO()
    with _quiet(), torch.no_grad():
        script: Any = torch.jit.trace(module, _example(2), check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(script, buffer, _extra_files={JSON_FILE: card.to_json()})
    return buffer.getvalue()


def _from_torchscript(path: Path) -> tuple[Predict, Metadata]:
    found = {JSON_FILE: ""}
    with _quiet():
        script: Any = torch.jit.load(str(path), _extra_files=found)  # type: ignore[no-untyped-call]
    return script, Metadata.from_json(found[JSON_FILE])


# safetensors, read by feddumap


def _to_safetensors(module: nn.Module, card: Metadata) -> bytes:
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    return tensor_bytes(tensors, {KEY: card.to_json(), "digest": digest(tensors)})


def load(path: Path) -> tuple[nn.Module, Metadata]:
    """The network of a safetensors export, in eval mode, and its card; anything amiss is an error."""
    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
            if KEY not in told:
                raise ValueError("it has no description of a network")
            tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if told.get("digest") != digest(tensors):
            raise ValueError("its checksum does not match")
        card = Metadata.from_json(told[KEY])
    except (OSError, ValueError, SafetensorError) as error:
        raise FeddumapError(
            f"cannot read {path} ({error}): give a file that `feddumap export DIR --to safetensors` wrote"
        ) from None
    return network(card.architecture, tensors).eval(), card


# ExecuTorch, read by its runtime: one image at a time, for the XNNPACK kernels of ordinary processors


def _to_executorch(module: nn.Module, card: Metadata) -> bytes:
    with _quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(
            torch.export.export(module, (_example(1),)),
            partitioner=[XnnpackPartitioner()],
            constant_methods={KEY: card.to_json()},
        )
        data: bytes = lowered.to_executorch().buffer
    return data


def _from_executorch(path: Path) -> tuple[Predict, Metadata]:
    with _quiet():
        from executorch.runtime import Runtime

        program = Runtime.get().load_program(path)
    forward = program.load_method("forward")
    assert forward is not None

    def predict(images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward.execute([images])[0]
        return logits.clone()  # the runtime writes the next answer in the same place

    return predict, Metadata.from_json(program.load_method(KEY).execute([])[0])


FORMATS = {
    "onnx": Format("onnx", _to_onnx, _from_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "torchscript": Format("pt", _to_torchscript, _from_torchscript),
    "safetensors": Format("safetensors", _to_safetensors, load),
    "executorch": Format("pte", _to_executorch, _from_executorch, ("executorch",), batch=1),
}
