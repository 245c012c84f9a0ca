"""Weight initialization: skipped if weights are loaded afterwards, or drawn from a random stream."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_RANDOM_INITIALIZERS = frozenset(
    {
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
        nn.init.normal_,
        nn.init.uniform_,
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
    }
)


class SkipInitialization(TorchFunctionMode):
    """Modules created in this context skip random initialization; the memory of their weights is not touched.

    Constants such as batch-norm statistics are still filled in, which the meta device would lose.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _RANDOM_INITIALIZERS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def seeded_global_generator(seed: int) -> Iterator[None]:
    """Seed torch's global generator within the context and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@torch.no_grad()
def initialise_layers(network: nn.Module, generator: torch.Generator) -> None:
    """Initialise all convolutions and linear layers, in the order of definition.

    Convolutions: weights N(0, 2/(k² · C_out)), biases 0. Linear layers: both U(±1/√inputs), torch's default.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            height, width = module.kernel_size
            module.weight.normal_(
                0, math.sqrt(2 / (height * width * module.out_channels)), generator=generator
            )
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            for parameter in module.parameters(recurse=False):
                parameter.uniform_(-bound, bound, generator=generator)


def channels_last(network: nn.Module, *, keep: bool) -> nn.Module:
    """Convert the weights of convolutions to channels-last, in place; without `keep` values are not
    copied."""
    for module in network.modules():
        if not isinstance(module, nn.Conv2d):
            continue
        if _has_channels_last_bug(module):
            module.register_forward_pre_hook(_contiguous_input)
            continue
        weight = module.weight.detach()
        laid_out = torch.empty_like(weight, memory_format=torch.channels_last)
        module.weight.data = laid_out.copy_(weight) if keep else laid_out
    return network


def _has_channels_last_bug(module: nn.Conv2d) -> bool:
    """Whether oneDNN's channels-last backward pass writes past its buffer (oneDNN issue 6035): strided 1×1
    float32 convolutions with fewer input channels than a vector register holds."""
    return module.kernel_size == (1, 1) and max(module.stride) > 1 and module.in_channels < 16


def _contiguous_input(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in inputs)
