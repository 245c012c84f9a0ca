"""Frozen parameters (`requires_grad = False`): constants of a network, which are not sent with its weights.

`Architecture.frozen` is their SHA-256. Every process knows the tensors of the hashes that it was given: from
the network's initialization, a run directory, shared memory or a message.
"""

from dataclasses import replace

from feddumap.core.messages import Architecture, Tensors
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError

_KNOWN: dict[str, Tensors] = {}


def with_constants(architecture: Architecture, constants: Tensors) -> Architecture:
    """The architecture with these constants, or with none; they are remembered in this process."""
    if not constants:
        return replace(architecture, frozen="")
    key = digest(constants)
    _KNOWN.setdefault(key, {name: tensor.detach().clone() for name, tensor in constants.items()})
    return replace(architecture, frozen=key)


def constants_of(architecture: Architecture) -> Tensors:
    """The frozen tensors of an architecture; none if all its tensors are weights."""
    if not architecture.frozen:
        return {}
    if architecture.frozen not in _KNOWN:
        raise FeddumapError(
            f"the frozen tensors {architecture.frozen[:12]} of {architecture.family} are not known to this "
            "process: read them from the run's directory first"
        )
    return _KNOWN[architecture.frozen]


def is_known(architecture: Architecture) -> bool:
    """Whether this process has the architecture's frozen tensors."""
    return not architecture.frozen or architecture.frozen in _KNOWN


def frozen_bytes(architecture: Architecture) -> int:
    """Bytes of the frozen tensors, which every device is sent once."""
    return sum(tensor.nbytes for tensor in constants_of(architecture).values())
