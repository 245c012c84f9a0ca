"""The registry of model families, and construction of networks from architectures.

>>> small = architecture("lenet", classes=10)
>>> small.channels
(('conv1', 6), ('conv2', 16))
>>> network(small, initialise(small, seed=1))(torch.zeros(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from feddumap.core.messages import CIFAR_INPUT, Architecture, InputSpec, Tensors, frozen_settings
from feddumap.core.object_names import is_object
from feddumap.core.rng import torch_stream
from feddumap.core.tensors import all_finite
from feddumap.errors import FeddumapError, unknown
from feddumap.models import chains, factories, resnet
from feddumap.models.checks import check_network
from feddumap.models.factories import Factory
from feddumap.models.frozen import constants_of, with_constants
from feddumap.models.initialization import (
    SkipInitialization,
    channels_last,
    initialise_layers,
    seeded_global_generator,
)
from feddumap.models.resize import shrink, widths_of
from feddumap.models.state import frozen, load_state, state_of


@dataclass(frozen=True)
class Family:
    """`full` creates the unpruned network for a number of classes, an input and keyword arguments;
    `resized`, if given, creates it with any widths."""

    full: Callable[[int, InputSpec, Mapping[str, Any]], nn.Module]
    resized: Callable[[Mapping[str, int], int, InputSpec], nn.Module] | None = None


def _chain(chain: chains.Chain) -> Family:
    return Family(lambda classes, given, _: chain.full(classes, given), chain.resized)


_FAMILIES = {
    "cnn": _chain(chains.CNN),
    "lenet": _chain(chains.LENET),
    "vgg11": _chain(chains.VGG11),
    "resnet18": Family(lambda classes, given, _: resnet.full(classes, given), resnet.resized),
    "mlp": _chain(chains.MLP),
}
_BUILTIN = frozenset(_FAMILIES)


def families() -> tuple[str, ...]:
    """The names of the registered families."""
    return tuple(_FAMILIES)


def is_builtin(name: str) -> bool:
    """Whether a family is part of this package."""
    return name in _BUILTIN


def factory_of(name: str) -> Callable[..., nn.Module] | None:
    """The function under which a family of the user's own is registered; None for any other name."""
    family = _FAMILIES.get(name)
    return family.full.function if family is not None and isinstance(family.full, Factory) else None


def register(name: str, factory: Callable[..., nn.Module]) -> None:
    """Register a family: `factory` creates its full network (`factories.Factory` says what it may take).

    Its convolutions and linear layers are found automatically; torch-pruning reduces it to smaller widths. A
    name cannot be registered again for another factory, since results, checkpoints and cost counts refer to
    it. Worker processes see it if the name begins with `python:`; otherwise name the model `module:factory`.
    """
    known = _FAMILIES.get(name)
    if known is not None and getattr(known.full, "function", None) is not factory:
        raise FeddumapError(f"the model name {name!r} is already registered: choose another")
    _FAMILIES.setdefault(name, Family(Factory(name, factory)))


def architecture(
    name: str,
    classes: int,
    given: InputSpec = CIFAR_INPUT,
    settings: Mapping[str, Any] | None = None,
) -> Architecture:
    """The full-width architecture of a family: a built-in one, one that is registered here or by another
    package, `module:factory`, `torchvision:NAME` or `timm:NAME`. A network of the user's is tried out."""
    if name not in _FAMILIES:
        if is_object(name):
            raise FeddumapError(
                f"model.name = {name!r} is an object of a Python program: pass it there, as in "
                "feddumap.Run(model=…, out=…), whose model() is the network"
            )
        function = factories.find(name)
        if function is None:
            raise unknown("model", name, [*_FAMILIES, *factories.names(), "module:factory of your own"])
        register(name, function)
    if classes < 1:
        raise FeddumapError(f"a network needs at least one class, not {classes}")
    if is_builtin(name):
        _check_builtin(name, given, settings or {})
    whole = Architecture(name, classes, (), given, frozen_settings(settings or {}))
    for key, value in whole.settings:
        if isinstance(value, dict):
            raise FeddumapError(f"model.{key} = {value!r}: expected numbers, text or lists of them")
    return replace(whole, channels=_full_channels(whole))


def unpruned(pruned: Architecture) -> Architecture:
    """The full-width architecture of the same network."""
    return architecture(pruned.family, pruned.classes, pruned.input, dict(pruned.settings))


def _check_builtin(name: str, given: InputSpec, settings: Mapping[str, Any]) -> None:
    if settings:
        key = next(iter(settings))
        raise FeddumapError(f"unknown key model.{key}: {name} has no keys but name and weights")
    if name != "mlp" and len(given.shape) != 3:
        raise FeddumapError(
            f"model.name = {name!r} needs images (channels × height × width), but the data set has "
            f"{given.describe()}: use mlp, or a network of your own"
        )
    if given.kind == "tokens":
        raise FeddumapError(
            f"model.name = {name!r} cannot read {given.describe()}: use a network of your own, with an "
            "embedding"
        )


def channels_of(network: nn.Module, narrowed: Container[str] = ()) -> tuple[tuple[str, int], ...]:
    """`Architecture.channels` of a network, in the order of definition: name and width of each `nn.Conv2d`,
    and of each other layer (linear, transposed, 1-d or 3-d convolution) that has been `narrowed`."""
    return tuple(
        (name, width)
        for name, width in widths_of(network).items()
        if name in narrowed or isinstance(network.get_submodule(name), nn.Conv2d)
    )


@lru_cache
def layer_widths(architecture: Architecture) -> Mapping[str, int]:
    """Name and width of each convolution and linear layer, in the order of definition."""
    return MappingProxyType(widths_of(build(architecture)))


def build(architecture: Architecture) -> nn.Module:
    """The network with *uninitialised* weights, its constants (batch norm) set, convolutions channels-last.

    For loading weights into: nothing is drawn and no memory is touched.
    """
    _check(architecture)
    if _needs_tracing(architecture):
        return deepcopy(_traced_template(architecture))
    with _uninitialized():
        return channels_last(_make(architecture), keep=False)


def initialise(architecture: Architecture, seed: int) -> Tensors:
    """The first weights and buffers, from the stream `init` of `seed`; convolutions channels-last.

    Built-in families are initialised as in the paper (`initialise_layers`). Any other network keeps the
    weights of its factory; random ones come from the same stream. Frozen tensors are among them, unless the
    architecture has its own (`Architecture.frozen`).
    """
    _check(architecture)
    generator = torch_stream(seed, "init")
    with seeded_global_generator(generator.initial_seed()):
        module = _make(architecture, first=True)
    if is_builtin(architecture.family):
        initialise_layers(module, generator)
    state = state_of(channels_last(module, keep=True))
    for name, tensor in state.items():
        if not all_finite({name: tensor}):
            raise FeddumapError(
                f"model.name = {architecture.family!r}: {name} is not finite at the start: for a constant "
                "such as a mask, use register_buffer(..., persistent=False)"
            )
    constants = constants_of(architecture)
    return {name: tensor for name, tensor in state.items() if name not in constants}


def separate(architecture: Architecture, everything: Tensors) -> tuple[Architecture, Tensors]:
    """The architecture with its frozen tensors as constants, and the weights without them."""
    names = frozen_names(architecture)
    constants = {name: tensor for name, tensor in everything.items() if name in names}
    weights = {name: tensor for name, tensor in everything.items() if name not in names}
    return with_constants(architecture, constants), weights


@lru_cache
def frozen_names(architecture: Architecture) -> frozenset[str]:
    """The names of the parameters that are not trained."""
    return frozen(build(architecture))


def network(architecture: Architecture, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """The network with copies of these weights and buffers, which must be complete and of matching shapes."""
    module = build(architecture)
    try:
        load_state(module, weights, constants_of(architecture))
    except FeddumapError as error:
        raise FeddumapError(f"the weights do not match this {architecture.family}: {error}") from None
    return module


def _check(given: Architecture) -> None:
    whole = unpruned(given)
    widths = given.widths
    if missing := whole.widths.keys() - widths.keys():
        raise FeddumapError(f"{given.family} needs the channels of {', '.join(sorted(missing))}")
    full = layer_widths(whole) if given.channels != whole.channels else whole.widths
    for name, width in given.channels:
        if name not in full:
            raise unknown(f"{given.family} layer", name, full)
        if width < 1:
            raise FeddumapError(f"{given.family}'s {name} needs at least one channel, not {width}")
        if width > full[name] and _FAMILIES[given.family].resized is None:
            raise FeddumapError(f"{given.family}'s {name} has only {full[name]} channels, not {width}")
    if len(widths) < len(given.channels):
        raise FeddumapError(f"{given.family}'s channels name a layer twice")


def _make(given: Architecture, *, first: bool = False) -> nn.Module:
    """The network; its pretrained weights, if it has any, are only read for its `first` weights."""
    family = _FAMILIES[given.family]
    if family.resized is not None:
        return _normalised(family.resized(given.widths, given.classes, given.input), given.input)
    settings = (
        dict(given.settings) if first else factories.without_weights(given.family, dict(given.settings))
    )
    made = family.full(given.classes, given.input, settings)
    if _needs_tracing(given):
        made = shrink(made, given.widths, given.input.example())
    return _normalised(made, given.input)


def _normalised(module: nn.Module, given: InputSpec) -> nn.Module:
    """Subtract `mean` and divide by `std` before the first layer, if the input has them."""
    if given.mean:
        shape = (-1, 1, 1) if len(given.shape) == 3 else (-1,)
        mean, std = (torch.tensor(values).view(shape) for values in (given.mean, given.std))
        module.register_forward_pre_hook(
            lambda _, inputs: ((inputs[0] - mean.to(inputs[0])) / std.to(inputs[0]),)
        )
    return module


def _needs_tracing(given: Architecture) -> bool:
    """Whether construction needs tracing: a registered family at reduced widths."""
    return _FAMILIES[given.family].resized is None and given.channels != unpruned(given).channels


@contextmanager
def _uninitialized() -> Iterator[None]:
    with seeded_global_generator(0), SkipInitialization():
        yield


@lru_cache
def _full_channels(whole: Architecture) -> tuple[tuple[str, int], ...]:
    family, settings = _FAMILIES[whole.family], factories.without_weights(whole.family, dict(whole.settings))
    with _uninitialized():
        made = family.full(whole.classes, whole.input, settings)
        channels = channels_of(made)
        if not is_builtin(whole.family):
            again = family.full(whole.classes, whole.input, settings)
            check_network(_normalised(made, whole.input), again, whole)
    return channels


@lru_cache(maxsize=4)
def _traced_template(given: Architecture) -> nn.Module:
    """Cached, because tracing is slower than copying and devices build the same network repeatedly."""
    with seeded_global_generator(0):
        return channels_last(_make(given), keep=False)
