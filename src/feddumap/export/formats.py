"""Export formats: an encoder and, with the format's own runtime, a decoder for each."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensor_bytes
from torch import nn

from feddumap.core.messages import Tensors
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError
from feddumap.export.metadata import INPUT, KEY, OUTPUT, Metadata
from feddumap.models import network, state_of

Predict = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Format:
    """`encode` serializes a network; `decode` loads the file as a function of inputs, and its metadata.

    `packages` are required imports; `batch` is the fixed batch size of a file, None for any.
    """

    suffix: str
    encode: Callable[[nn.Module, Metadata], bytes]
    decode: Callable[[Path], tuple[Predict, Metadata]]
    packages: tuple[str, ...] = ()
    batch: int | None = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' warnings about optional packages and future interface changes."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ONNX, read by onnxruntime


def _to_onnx(module: nn.Module, metadata: Metadata) -> bytes:
    batch = torch.export.Dim("batch")
    with _quiet():
        program = torch.onnx.export(
            module,
            (metadata.architecture.input.example(2),),
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
        del part.metadata_props[:]  # source locations, with paths of this machine
    entry = proto.metadata_props.add()
    entry.key, entry.value = KEY, metadata.to_json()
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def _from_onnx(path: Path) -> tuple[Predict, Metadata]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        (logits,) = session.run([OUTPUT], {INPUT: inputs.numpy()})
        return torch.from_numpy(logits)

    return predict, Metadata.from_json(session.get_modelmeta().custom_metadata_map[KEY])


# safetensors, read by feddumap


def _to_safetensors(module: nn.Module, metadata: Metadata) -> bytes:
    tensors = {name: tensor.contiguous() for name, tensor in state_of(module).items()}
    return tensor_bytes(tensors, {KEY: metadata.to_json(), "digest": digest(tensors)})


def load(path: Path) -> tuple[nn.Module, Metadata]:
    """The network of a safetensors export, in eval mode, and its metadata; an invalid file is an error."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if KEY not in header:
                raise ValueError("it has no metadata of a network")
            tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header.get("digest") != digest(tensors):
            raise ValueError("its checksum does not match")
        metadata = Metadata.from_json(header[KEY])
    except (OSError, ValueError, SafetensorError) as error:
        raise FeddumapError(
            f"cannot read {path} ({error}): expected a file written by `feddumap export DIR --to safetensors`"
        ) from None
    return network(metadata.architecture, tensors).eval(), metadata


# ExecuTorch, read by its runtime: batches of one image, for XNNPACK's CPU kernels


def _to_executorch(module: nn.Module, metadata: Metadata) -> bytes:
    with _quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(
            torch.export.export(module, (metadata.architecture.input.example(1),)),
            partitioner=[XnnpackPartitioner()],
            constant_methods={KEY: metadata.to_json()},
        )
        data: bytes = lowered.to_executorch().buffer
    return data


def _from_executorch(path: Path) -> tuple[Predict, Metadata]:
    with _quiet():
        from executorch.runtime import Runtime

        program = Runtime.get().load_program(path)
    forward = program.load_method("forward")
    assert forward is not None

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward.execute([inputs])[0]
        return logits.clone()  # the runtime reuses its output buffer

    return predict, Metadata.from_json(program.load_method(KEY).execute([])[0])


FORMATS = {
    "onnx": Format("onnx", _to_onnx, _from_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "safetensors": Format("safetensors", _to_safetensors, load),
    "executorch": Format("pte", _to_executorch, _from_executorch, ("executorch",), batch=1),
}
