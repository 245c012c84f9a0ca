"""Named random streams.

There is no global generator. Whoever needs randomness asks for the stream of its own name, usually
(seed, purpose, round, device); equal names give equal numbers, so the result depends neither on the number
of workers nor on where a run was interrupted, and nothing about randomness is ever saved.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def stream(seed: int, *name: str | int) -> np.random.Generator:
    """The generator called `name` under `seed`.

    >>> stream(777, "select", 3).integers(1000) == stream(777, "select", 3).integers(1000)
    np.True_
    >>> bool((stream(1, "a", 1).random(4) == stream(1, "a", 2).random(4)).any())
    False
    """
    return np.random.Generator(np.random.Philox(key=_key(seed, name)))


def torch_stream(seed: int, *name: str | int) -> torch.Generator:
    """The same for torch's samplers, on the CPU."""
    return torch.Generator().manual_seed(_key(seed, name) & (2**63 - 1))


@contextmanager
def layer_noise(seed: int, *name: str | int) -> Iterator[None]:
    """A context for layers that draw from torch's global generator (dropout): it starts as the stream called
    `name`, on the CPU, and is as it was before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_key(seed, name) & (2**63 - 1))
        yield


def _key(seed: int, name: tuple[str | int, ...]) -> int:
    # repr keeps 1 and "1" apart, the digest keeps neighbouring names independent
    digest = hashlib.sha256(repr((int(seed), *name)).encode()).digest()
    return int.from_bytes(digest[:16], "little")
