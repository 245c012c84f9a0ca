"""The registry of model families, and construction of networks from architectures.

>>> small = architecture("lenet", classes=10)
>>> small.channels
(('conv1', 6), ('conv2', 16))
>>> network(small, initialise(small, seed=1))(torch.zeros(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

import torch
from torch import nn

from feddumap.core.messages import Architecture, Tensors
from feddumap.core.rng import torch_stream
from feddumap.errors import FeddumapError, unknown
from feddumap.models import chains, resnet
from feddumap.models.initialization import (
    SkipInitialization,
    channels_last,
    initialise_layers,
    seeded_global_generator,
)
from feddumap.models.resize import shrink

INPUT_SHAPE = (1, 3, 32, 32)
"""One image: the input for cost counts and tracing."""


@dataclass(frozen=True)
class Family:
    """`full` creates the unpruned network; `resized`, if given, creates it with any widths."""

    full: Callable[[int], nn.Module]
    resized: Callable[[Mapping[str, int], int], nn.Module] | None = None


_FAMILIES = {
    "cnn": Family(chains.CNN.full, chains.CNN.resized),
    "lenet": Family(chains.LENET.full, chains.LENET.resized),
    "vgg11": Family(chains.VGG11.full, chains.VGG11.resized),
    "resnet18": Family(resnet.full, resnet.resized),
}
_BUILTIN = frozenset(_FAMILIES)


def families() -> tuple[str, ...]:
    """The names of the registered families."""
    return tuple(_FAMILIES)


def is_builtin(name: str) -> bool:
    """Whether a family is part of this package."""
    return name in _BUILTIN


def register(name: str, factory: Callable[[int], nn.Module]) -> None:
    """Register a family: `factory(classes)` creates its full network, for images of 3×32×32.

    Its convolutions (`nn.Conv2d`) are found automatically; torch-pruning reduces it to smaller widths. A name
    cannot be registered again for another factory, since results, checkpoints and cost counts refer to it.
    Worker processes do not see the registrations of this process: name the model `module:factory` for those.
    """
    if name in _FAMILIES and _FAMILIES[name].full != factory:
        raise FeddumapError(f"the model name {name!r} is already registered: choose another")
    _FAMILIES.setdefault(name, Family(factory))


def architecture(name: str, classes: int) -> Architecture:
    """The full-width architecture of a family; `module:factory` names a family by its import path."""
    if name not in _FAMILIES:
        _import(name)
    if classes < 1:
        raise FeddumapError(f"a network needs at least one class, not {classes}")
    return Architecture(name, classes, _full_channels(name, classes))


def _import(name: str) -> None:
    """Register `module:factory`, which other processes and machines can import too."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise unknown("model", name, [*_FAMILIES, "module:factory of your own"])
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise FeddumapError(
            f"model {name!r} cannot be imported ({error}): expected module:factory, where factory(classes) "
            "creates the network and the module is importable"
        ) from error
    register(name, factory)


def channels_of(network: nn.Module) -> tuple[tuple[str, int], ...]:
    """Name and output channels of each convolution, in the order of definition."""
    return tuple(
        (name, module.out_channels)
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d)
    )


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
    weights of its factory; random ones come from the same stream.
    """
    _check(architecture)
    generator = torch_stream(seed, "init")
    with seeded_global_generator(generator.initial_seed()):
        module = _make(architecture)
    if is_builtin(architecture.family):
        initialise_layers(module, generator)
    return dict(channels_last(module, keep=True).state_dict())


def network(architecture: Architecture, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """The network with copies of these weights and buffers, which must be complete and of matching shapes."""
    module = build(architecture)
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise FeddumapError(f"the weights do not match this {architecture.family}: {error}") from error
    return module


def _check(given: Architecture) -> None:
    full = architecture(given.family, given.classes).widths
    widths = given.widths
    if missing := full.keys() - widths.keys():
        raise FeddumapError(f"{given.family} needs the channels of {', '.join(sorted(missing))}")
    for name, width in given.channels:
        if name not in full:
            raise unknown(f"{given.family} layer", name, full)
        if width < 1:
            raise FeddumapError(f"{given.family}'s {name} needs at least one channel, not {width}")
        if width > full[name] and _FAMILIES[given.family].resized is None:
            raise FeddumapError(f"{given.family}'s {name} has only {full[name]} channels, not {width}")
    if len(widths) < len(given.channels):
        raise FeddumapError(f"{given.family}'s channels name a layer twice")


def _make(given: Architecture) -> nn.Module:
    family = _FAMILIES[given.family]
    if family.resized is not None:
        return family.resized(given.widths, given.classes)
    full = family.full(given.classes)
    return shrink(full, given.widths, torch.zeros(INPUT_SHAPE)) if _needs_tracing(given) else full


def _needs_tracing(given: Architecture) -> bool:
    """Whether construction needs tracing: a registered family at reduced widths."""
    full = dict(_full_channels(given.family, given.classes))
    return _FAMILIES[given.family].resized is None and given.widths != full


@contextmanager
def _uninitialized() -> Iterator[None]:
    with seeded_global_generator(0), SkipInitialization():
        yield


@lru_cache
def _full_channels(name: str, classes: int) -> tuple[tuple[str, int], ...]:
    with _uninitialized():
        return channels_of(_FAMILIES[name].full(classes))


@lru_cache(maxsize=4)
def _traced_template(given: Architecture) -> nn.Module:
    """Cached, because tracing is slower than copying and devices build the same network repeatedly."""
    with seeded_global_generator(0):
        return channels_last(_make(given), keep=False)
