"""Cut any network: layers that have units, a trace of which layers share them, reduction to given widths."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from feddumap.errors import FeddumapError


def is_convolution(module: object) -> bool:
    """Whether a module's units are filters, of a transposed convolution too."""
    return isinstance(module, _ConvNd)


def is_transposed(module: object) -> bool:
    return isinstance(module, _ConvTransposeNd)


def width_of(module: object) -> int | None:
    """The number of units of a convolution or linear layer; None for other modules."""
    if isinstance(module, _ConvNd):
        return module.out_channels
    return module.out_features if isinstance(module, nn.Linear) else None


def widths_of(network: nn.Module) -> dict[str, int]:
    """Name and width of each convolution and linear layer, in the order of definition."""
    named = ((name, width_of(module)) for name, module in network.named_modules())
    return {name: width for name, width in named if width is not None}


def trace(network: nn.Module, example: torch.Tensor) -> Any:
    """Torch-Pruning's dependency graph of a network, by a forward pass of `example`; the network is in eval
    mode then, and all its parameters require gradients."""
    try:
        import torch_pruning
    except ImportError as error:
        raise FeddumapError("cutting a network needs torch-pruning: pip install torch-pruning") from error

    class RMSNormPruner(torch_pruning.BasePruningFunc):  # type: ignore[misc]
        """Torch-Pruning has none."""

        def prune_out_channels(self, layer: nn.RMSNorm, idxs: Sequence[int]) -> nn.Module:
            (width,) = layer.normalized_shape
            kept = sorted(set(range(width)) - set(idxs))
            layer.normalized_shape = (len(kept),)
            if layer.weight is not None:
                layer.weight = nn.Parameter(layer.weight.data[kept])
            return layer

        prune_in_channels = prune_out_channels

        def get_out_channels(self, layer: nn.RMSNorm) -> int:
            return layer.normalized_shape[0]

        get_in_channels = get_out_channels

    for parameter in network.parameters():
        parameter.requires_grad_(True)
    with torch.enable_grad():
        return torch_pruning.DependencyGraph().build_dependency(
            network.eval(),
            example_inputs=example,
            forward_fn=lambda module, inputs: module(inputs),
            customized_pruners={nn.RMSNorm: RMSNormPruner()},
            verbose=False,
        )


def group_of(graph: Any, module: nn.Module, units: Sequence[int]) -> Any:
    """All that Torch-Pruning removes together with these units of a layer."""
    import torch_pruning

    prune = (
        torch_pruning.prune_linear_out_channels
        if isinstance(module, nn.Linear)
        else torch_pruning.prune_conv_out_channels
    )
    return graph.get_pruning_group(module, prune, list(units))


def shrink(network: nn.Module, widths: Mapping[str, int], example: torch.Tensor) -> nn.Module:
    """Remove the last units of each layer, in place, down to `widths[name]` units.

    Dependent layers (norms, the next layers' inputs, layers coupled by a sum, a concatenation or a depthwise
    convolution) shrink accordingly; `example` is an input for tracing.
    """
    classes = _outputs(network, example)
    trainable = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
    try:
        _prune(network, widths, example)
        after = _outputs(network, example)
    except FeddumapError:
        raise
    except Exception as error:
        raise FeddumapError(f"the network cannot be reduced to {_show(widths)}: {error}") from error
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(trainable[name])
    got = widths_of(network)
    wrong = {name: width for name, width in widths.items() if got[name] != width}
    if wrong:
        left = _show({name: got[name] for name in wrong})
        raise FeddumapError(f"{_show(wrong)} conflicts with layers that share channels, which leave {left}")
    if after != classes:
        raise FeddumapError(f"reducing to {_show(widths)} would leave {after} of {classes} outputs")
    return network.train()


def _prune(network: nn.Module, widths: Mapping[str, int], example: torch.Tensor) -> None:
    graph = trace(network, example)
    # depthwise convolutions last: their widths follow from their inputs
    for name in sorted(widths, key=lambda name: getattr(network.get_submodule(name), "groups", 1) > 1):
        module = network.get_submodule(name)
        surplus = range(widths[name], width_of(module) or 0)
        if surplus:
            group_of(graph, module, surplus).prune()


@torch.no_grad()
def _outputs(network: nn.Module, example: torch.Tensor) -> int:
    outputs: torch.Tensor = network.eval()(example)
    return outputs.shape[1]


def _show(widths: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={width}" for name, width in widths.items())
