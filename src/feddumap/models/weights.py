"""Weights to start from, in a safetensors file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from feddumap.core.messages import Tensors
from feddumap.core.tensors import all_finite, forms_of
from feddumap.errors import FeddumapError


def read_weights(path: Path, like: Tensors) -> Tensors:
    """The weights and buffers of a file, which must have the names, types and shapes of `like`."""
    given = f"model.weights = {str(path)!r}"
    try:
        found: Tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise FeddumapError(f"{given} cannot be read ({error}): give a safetensors file") from None
    expected, forms = forms_of(like), forms_of(found)
    if missing := sorted(expected.keys() - forms.keys()):
        raise FeddumapError(f"{given} has no tensor {missing[0]}: expected the weights of this network")
    if other := sorted(forms.keys() - expected.keys()):
        raise FeddumapError(f"{given} has a tensor {other[0]}, which this network has not: remove it")
    for name, form in expected.items():
        if forms[name] != form:
            raise FeddumapError(
                f"{given}: {name} is {forms[name].dtype} {list(forms[name].shape)}, expected {form.dtype} "
                f"{list(form.shape)}"
            )
    if not all_finite(found):
        raise FeddumapError(f"{given} holds NaN or infinite numbers: give finite weights")
    return {name: found[name] for name in like}
