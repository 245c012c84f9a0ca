"""What slots may return: tensors of given names and forms, and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from feddumap.core.tensors import forms_of

RESERVED = frozenset(
    {
        *("round", "accuracy", "loss", "lr", "devices", "samples", "parameters", "macs"),
        *("bytes_down", "bytes_up", "clock", "wall", "validation", "dropped", "rejected", "lost"),
        *("dominant", "device_accuracy", "backdoor"),
    }
)
"""The names in a round's record that are not a method's."""


class Wrong(Exception):  # noqa: N818 (it is a reason, not an error of its own)
    """Why a value is not what was expected, as the end of a sentence."""


def tensors(value: Any) -> None:
    """A dict of tensors by name."""
    if not isinstance(value, dict):
        raise Wrong(f"is of type {type(value).__name__}: expected a dict of tensors by name")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise Wrong(f"has {name!r} of type {type(tensor).__name__}: expected a dict of tensors by name")


def same_tensors(value: Any, like: Mapping[str, torch.Tensor]) -> None:
    """Tensors of the names, shapes and types of the model's."""
    tensors(value)
    if missing := [name for name in like if name not in value]:
        raise Wrong(f"lack {missing[0]!r}: expected {len(like)} tensors, those of the model")
    if unknown := [name for name in value if name not in like]:
        raise Wrong(f"have {unknown[0]!r}, which the model has not: expected its {len(like)} tensors")
    expected = forms_of(dict(like))
    for name, form in forms_of(value).items():
        if form != expected[name]:
            want = expected[name]
            raise Wrong(
                f"have {name!r} as {form.dtype} {list(form.shape)}: expected {want.dtype} {list(want.shape)}"
            )


def named_like(value: Any, like: Mapping[str, torch.Tensor]) -> None:
    """Tensors named `PREFIX/` and a tensor of the model, and of its shape and type."""
    tensors(value)
    for name, tensor in value.items():
        weight = like.get(name.rsplit("/", 1)[-1])
        if weight is None:
            raise Wrong(f"has {name!r}: expected names such as 'h/{next(iter(like), 'weight')}'")
        if (tensor.shape, tensor.dtype) != (weight.shape, weight.dtype):
            raise Wrong(
                f"has {name!r} as {tensor.dtype} {list(tensor.shape)}: expected the form of the model's "
                f"tensor, {weight.dtype} {list(weight.shape)}"
            )


def json_object(value: Any) -> None:
    """Metrics: a dict that JSON can hold, whose names are not those of the record itself."""
    if not isinstance(value, dict):
        raise Wrong(f"of type {type(value).__name__}: expected a dict, {{}} for none")
    for name, metric in value.items():
        if not isinstance(name, str) or name in RESERVED:
            raise Wrong(f"named {name!r}, which a record has already: choose another name")
        try:
            json.dumps(metric, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise Wrong(
                f"with {name!r} = {metric!r} ({error}): expected what JSON holds, such as float(...) or None"
            ) from None
