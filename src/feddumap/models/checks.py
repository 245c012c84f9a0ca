"""Checks of a user's network before it is trained: each mistake is one sentence."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from feddumap.core.messages import Architecture
from feddumap.core.tensors import DTYPES
from feddumap.errors import FeddumapError
from feddumap.models.factories import first_line
from feddumap.models.state import trainable


def check_network(module: nn.Module, again: nn.Module, whole: Architecture) -> None:
    """Check a network; `again` is what a second call of its factory created."""
    prefix = f"model.name = {whole.family!r}: "
    if fault := _tensor_fault(module) or _sharing_fault(module, again):
        raise FeddumapError(prefix + fault)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()  # memory that is not initialised may hold NaN
    for training in (False, True):
        if fault := _output_fault(module.train(training), whole):
            raise FeddumapError(prefix + fault)


def _tensor_fault(module: nn.Module) -> str | None:
    for name, tensor in module.state_dict(keep_vars=True).items():
        if is_lazy(tensor):
            return f"the size of {name} is not known before data arrives: use a layer that is not lazy"
        if not isinstance(tensor, torch.Tensor):
            return f"{name} is {type(tensor).__name__}, expected tensors only: do without extra state"
        if "/" in name:
            return f"the name of {name} has a slash: choose another"
        kind = str(tensor.dtype).removeprefix("torch.")
        if isinstance(tensor, nn.Parameter) and tensor.dtype != torch.float32:
            return f"the parameter {name} is {kind}, expected float32: call .float() in the factory"
        if kind not in DTYPES:
            return f"the buffer {name} is {kind}, expected one of {', '.join(DTYPES)}"
    if not any(True for _ in module.parameters()):
        return "it has no parameters, so there is nothing to train"
    if not trainable(module):
        return "all its parameters are frozen: set requires_grad of those that are to be trained"
    return None


def _sharing_fault(module: nn.Module, again: nn.Module) -> str | None:
    earlier = {id(parameter) for parameter in again.parameters()}
    places: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) in earlier:
            return (
                f"two calls of the factory returned the same parameter {name}: create the network inside of "
                "the factory"
            )
        place = parameter.untyped_storage().data_ptr()
        if parameter.numel() and place in places:
            return (
                f"the parameters {places[place]} and {name} share memory: to tie them, assign the parameter "
                "itself, not its data"
            )
        places[place] = name
    return None


@torch.no_grad()
def _output_fault(module: nn.Module, whole: Architecture) -> str | None:
    example = whole.input.example(2)
    given = f"a batch of shape {list(example.shape)} ({whole.input.describe()})"
    mode = "training" if module.training else "evaluation"
    try:
        outputs = module(example)
    except Exception as error:  # a user's network may raise anything
        return f"the network cannot take {given} in {mode} mode ({first_line(error)}): adapt it to the data"
    if not isinstance(outputs, torch.Tensor):
        return f"for {given} it returns {type(outputs).__name__} in {mode} mode, expected one tensor"
    if tuple(outputs.shape) != (2, whole.classes) or outputs.dtype != torch.float32:
        kind = str(outputs.dtype).removeprefix("torch.")
        return (
            f"for {given} it returns {kind} {list(outputs.shape)} in {mode} mode, expected float32 "
            f"{[2, whole.classes]}: an output for each of the {whole.classes} classes"
        )
    return None
