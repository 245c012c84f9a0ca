"""Inputs near valid ones: bytes changed, cut, repeated and moved, and values that broke parsers put in."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from tests.fuzz.targets import NASTY

MOST_CHANGES = 4
LONGEST = 1 << 18  # bytes


def inputs(seeds: list[bytes], seed: int) -> Iterator[bytes]:
    """The seeds, the values of `NASTY` in place of each of their values, then random changes without end."""
    yield from seeds
    for whole in seeds:
        for found in list(re.finditer(rb"[\w.+-]+", whole))[:60]:
            for value in NASTY:
                yield whole[: found.start()] + value + whole[found.end() :]
    rng = np.random.default_rng(seed)
    while True:
        data = bytearray(seeds[int(rng.integers(len(seeds)))])
        for _ in range(int(rng.integers(1, MOST_CHANGES + 1))):
            _change(data, rng)
        yield bytes(data[:LONGEST])


def _change(data: bytearray, rng: np.random.Generator) -> None:
    place = int(rng.integers(len(data) + 1))
    length = int(2 ** rng.uniform(0, 6))
    match int(rng.integers(7)):
        case 0 if data:
            data[min(place, len(data) - 1)] ^= 1 << int(rng.integers(8))
        case 1:
            data[place : place + length] = rng.bytes(length)
        case 2:
            del data[place : place + length]
        case 3:
            data[place:place] = data[place : place + length] * int(rng.integers(1, 50))
        case 4:
            data[place:place] = NASTY[int(rng.integers(len(NASTY)))]
        case 5:
            data[place : place + 4] = int(rng.integers(2**32)).to_bytes(4, "little")
        case 6:
            del data[place:]
