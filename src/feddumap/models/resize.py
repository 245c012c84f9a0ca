"""Reduce any network to given widths by tracing which layers share channels."""

from collections.abc import Mapping

import torch
from torch import nn

from feddumap.errors import FeddumapError


def shrink(network: nn.Module, widths: Mapping[str, int], example: torch.Tensor) -> nn.Module:
    """Remove the last output channels of each convolution, in place, down to `widths[name]` channels.

    Dependent layers (batch norm, the next layers' inputs, layers coupled by a sum, a concatenation or a
    depthwise convolution) shrink accordingly; `example` is an input for tracing.
    """
    classes = _outputs(network, example)
    try:
        with torch.enable_grad():
            _prune(network, widths, example)
        after = _outputs(network, example)
    except FeddumapError:
        raise
    except Exception as error:
        raise FeddumapError(f"the network cannot be reduced to {_show(widths)}: {error}") from error
    got = {name: _convolution(network, name).out_channels for name in widths}
    wrong = {name: width for name, width in widths.items() if got[name] != width}
    if wrong:
        left = _show({name: got[name] for name in wrong})
        raise FeddumapError(f"{_show(wrong)} conflicts with layers that share channels, which leave {left}")
    if after != classes:
        raise FeddumapError(f"reducing to {_show(widths)} would leave {after} of {classes} outputs")
    return network.train()


def _prune(network: nn.Module, widths: Mapping[str, int], example: torch.Tensor) -> None:
    try:
        import torch_pruning
    except ImportError as error:
        raise FeddumapError(
            "resizing a registered network needs torch-pruning: pip install torch-pruning"
        ) from error
    graph = torch_pruning.DependencyGraph().build_dependency(network, example_inputs=example, verbose=False)
    # depthwise convolutions last: their widths follow from their inputs
    for name in sorted(widths, key=lambda name: _convolution(network, name).groups > 1):
        convolution = _convolution(network, name)
        surplus = list(range(widths[name], convolution.out_channels))
        if surplus:
            graph.get_pruning_group(convolution, torch_pruning.prune_conv_out_channels, surplus).prune()


@torch.no_grad()
def _outputs(network: nn.Module, example: torch.Tensor) -> int:
    outputs: torch.Tensor = network.eval()(example)
    return outputs.shape[1]


def _convolution(network: nn.Module, name: str) -> nn.Conv2d:
    module = network.get_submodule(name)
    assert isinstance(module, nn.Conv2d)
    return module


def _show(widths: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={width}" for name, width in widths.items())
