"""Tries out cuts with random weights and inputs in float64, before anything is trained and at the cut itself.

A cut is right if the network in which nobody reads the removed units (the input weights that belong to them
are zero in all layers that read them) (a) does not depend on these units' own parameters, and (b) computes
what the cut network computes.

Exempt are the statistics of `layer_norm`, `group_norm` and `rms_norm`: they are taken over all units, so that
a network from which some are removed cannot compute the same. In trials these functions only apply their
weight and bias, in both networks. Batch and instance norm treat each unit by itself and are not exempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from feddumap.core.messages import Architecture, Tensors
from feddumap.core.rng import stream, torch_stream
from feddumap.errors import FeddumapError
from feddumap.models import build, layer_widths
from feddumap.models.resize import is_transposed, width_of
from feddumap.pruning.removal import PruningPlan, plan
from feddumap.pruning.structure import Candidates, PrunableLayer, is_depthwise, line_of

TOLERANCE = 1e-9
AMOUNTS = (0.0, 0.25, 0.5, 1.0)
"""Shares of a layer's units that trials remove: at least one, at most all but one."""


def verified(architecture: Architecture, found: Candidates) -> Candidates:
    """The candidates that can be cut one by one and all together; the others are refused.

    All together, at every amount of each, is enough where it succeeds. Otherwise each layer is tried alone,
    and then those that passed are joined one after another.
    """
    if _fault_of(architecture, found.layers) is None:
        return found
    refused = dict(found.refused)
    alone = []
    for layer in found.layers:
        fault = _fault_of(architecture, [layer])
        if fault is None:
            alone.append(layer)
        else:
            refused.update(dict.fromkeys(layer.members, _explain(layer, fault)))
    if _fault_of(architecture, alone) is not None:
        together: list[PrunableLayer] = []
        for layer in alone:
            fault = _fault_of(architecture, [*together, layer])
            if fault is None:
                together.append(layer)
            else:
                reason = f"it can be cut alone, but not together with the layers before it: {fault}"
                refused.update(dict.fromkeys(layer.members, reason))
        alone = together
    return Candidates(tuple(alone), refused)


def check_cut(architecture: Architecture, cut: PruningPlan) -> None:
    """Raise an error if the cut network computes anything else than the one with the same units zeroed."""
    if cut.architecture != architecture and (fault := _compare(architecture, cut)):
        raise FeddumapError(
            f"{architecture.family} cannot be pruned as planned: {fault}; leave out layers with method.keep, "
            "or use a method without pruning"
        )


def _fault_of(architecture: Architecture, layers: Sequence[PrunableLayer]) -> str | None:
    """What is wrong with cutting these layers, at the first amount where something is; None if nothing."""
    if not layers:
        return None
    for turn in range(len(AMOUNTS)):
        try:
            cut = plan(architecture, trial(architecture, layers, turn))
        except FeddumapError as error:
            return f"a trial cut cannot run ({line_of(error.__cause__ or error)})"
        if fault := _compare(architecture, cut):
            return fault
    return None


def trial(architecture: Architecture, layers: Sequence[PrunableLayer], turn: int) -> dict[str, list[int]]:
    """Random units of each layer, in ascending order. Neighbours lose different amounts, and each layer loses
    every amount in one of four turns."""
    widths = layer_widths(architecture)
    drop = {}
    for position, layer in enumerate(layers):
        width = widths[layer.leader]
        amount = AMOUNTS[(turn + position) % len(AMOUNTS)]
        count = max(1, min(int(amount * width), width - 1))
        chosen = stream(0, "cut-trial", layer.leader, count).choice(width, count, replace=False)
        drop[layer.leader] = sorted(int(unit) for unit in chosen)
    return drop


def _compare(architecture: Architecture, cut: PruningPlan) -> str | None:
    whole = build(architecture).double()
    first, second = (random_state(whole, seed) for seed in (1, 2))
    removed = {name: _complement(first[name], kept) for name, kept in cut.kept.items()}
    unread = _input_weights(whole, removed)
    silent = {name: t.masked_fill(unread[name], 0) if name in unread else t for name, t in first.items()}
    redrawn = dict(silent)
    for name, gone in removed.items():
        own = gone & ~unread[name] if name in unread else gone
        redrawn[name] = torch.where(own, second[name], silent[name])
    inputs = architecture.input.random(2, torch_stream(0, "cut-trial-inputs"))
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    try:
        expected, other = (_run(whole, state, inputs) for state in (silent, redrawn))
        got = _run(build(cut.architecture).double(), cut.apply(silent), inputs)
    except Exception as error:  # a user's network may raise anything
        return f"a trial cut cannot run ({line_of(error)})"
    if not torch.isfinite(expected).all():
        return "with random weights the network's outputs are not finite"
    if got.shape != expected.shape:
        return f"a trial cut changes the outputs from {list(expected.shape)} to {list(got.shape)}"
    limit = TOLERANCE * float(expected.abs().max())
    if float((other - expected).abs().max()) > limit:
        return "its units act on more than the weights that a cut removes"
    if not float((got - expected).abs().max()) <= limit:
        return "a cut network computes something else than the network with the same units zeroed"
    return None


def random_state(network: nn.Module, seed: int) -> Tensors:
    """Random parameters and batch-norm statistics of a network, of a scale that keeps signals alive; other
    buffers are as they are. A tensor with two names has one value."""
    generator = torch_stream(seed, "cut-trial-weights")
    trained = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    drawn: dict[tuple[int, int], torch.Tensor] = {}
    state: Tensors = {}
    for name, tensor in network.state_dict().items():
        key = (tensor.data_ptr(), tensor.numel())
        if name.endswith("running_var"):
            state[name] = 0.5 + torch.rand(tensor.shape, dtype=torch.float64, generator=generator)
        elif name in trained or name.endswith("running_mean"):
            if key not in drawn:
                inputs = tensor[0].numel() if tensor.dim() > 1 else 2
                values = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
                drawn[key] = values * (2 / max(inputs, 1)) ** 0.5
            state[name] = drawn[key]
        else:
            state[name] = tensor.clone()
    return state


def _complement(tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    gone = torch.ones(tensor.numel(), dtype=torch.bool)
    gone[kept.reshape(-1)] = False
    return gone.view(tensor.shape)


def _input_weights(network: nn.Module, removed: Mapping[str, torch.Tensor]) -> Tensors:
    """Of each layer that reads removed units, the weights by which it does."""
    found: Tensors = {}
    for name, module in network.named_modules(remove_duplicate=False):
        gone = removed.get(f"{name}.weight")
        if gone is None or width_of(module) is None or is_depthwise(module):
            continue
        inputs = 0 if is_transposed(module) else 1
        columns = gone.movedim(inputs, 0).flatten(1).all(1)
        shape = [1] * gone.dim()
        shape[inputs] = -1
        found[f"{name}.weight"] = columns.view(shape).expand_as(gone)
    return found


@torch.no_grad()
def _run(network: nn.Module, state: Tensors, inputs: torch.Tensor) -> torch.Tensor:
    network.load_state_dict(state)
    with AffineNorms():
        outputs: torch.Tensor = network.eval()(inputs)
    return outputs


def _affine(
    inputs: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, shape: Sequence[int]
) -> torch.Tensor:
    if weight is not None:
        inputs = inputs * weight.view(*shape)
    return inputs if bias is None else inputs + bias.view(*shape)


def _layer_norm(
    inputs: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 0
) -> Any:
    return _affine(inputs, weight, bias, list(normalized_shape))


def _rms_norm(inputs: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    return _affine(inputs, weight, None, list(normalized_shape))


def _group_norm(inputs: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: Any = 0) -> Any:
    return _affine(inputs, weight, bias, [-1] + [1] * (inputs.dim() - 2))


_AFFINE: dict[Callable[..., Any], Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
}


class AffineNorms(TorchFunctionMode):
    """Layer, RMS and group norm apply weight and bias only in this context."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func not in _AFFINE:
            return func(*args, **named)
        if "input" in named:
            args = (named.pop("input"), *args)
        return _AFFINE[func](*args, **named)


def _explain(layer: PrunableLayer, fault: str) -> str:
    """The fault, with what the units pass on their way."""
    if not layer.passed:
        return fault
    readers = ", ".join(layer.readers[:3]) + (", …" if len(layer.readers) > 3 else "")
    return f"{fault}: on the way to {readers} they pass {', '.join(layer.passed)}"
