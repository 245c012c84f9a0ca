"""Loads the compiled kernels in the best variant for this processor."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_void_p
from functools import lru_cache
from pathlib import Path

import torch

from feddumap.errors import FeddumapError

VERSION = 2
"""The value that `fdm_version` in chain.c returns."""

REMEDY = (
    "install a C compiler (gcc 12 or clang 15, or newer) and run `pip install --force-reinstall --no-deps .` "
    "again, or install a wheel that was built with one"
)

_BEST_FIRST = {"AVX512": ("avx512", "avx2", "baseline"), "AVX2": ("avx2", "baseline")}
"""Variants by the CPU capability that torch reports."""

_IMAGES = (c_void_p, c_int, c_int, c_void_p, c_void_p)
_SIGNATURES = {
    "fdm_version": (c_int, ()),
    "fdm_create": (c_void_p, (c_int, POINTER(c_int32), c_int, c_int, c_int)),
    "fdm_destroy": (None, (c_void_p,)),
    "fdm_gradients": (
        c_double,
        (c_void_p, c_int, *_IMAGES, c_void_p, c_void_p, c_float, c_void_p, c_void_p),
    ),
    "fdm_outputs": (
        None,
        (c_void_p, c_int, *_IMAGES, c_void_p, c_void_p),
    ),
    "fdm_backward": (None, (c_void_p, c_int, c_void_p, c_void_p, c_void_p)),
    "fdm_hessian_start": (c_int, (c_void_p, c_int)),
    "fdm_hessian_product": (None, (c_void_p, c_int, c_float, c_void_p, c_void_p, c_void_p)),
}


class Library:
    """A loaded variant. Its functions take addresses; `feddumap.training.kernels.chain` checks their
    arguments."""

    def __init__(self, path: Path, variant: str) -> None:
        self.variant = variant
        self.calls = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.calls, name)
            function.restype, function.argtypes = result, arguments
        if (found := self.calls.fdm_version()) != VERSION:
            raise OSError(f"{path.name} is of version {found}, expected {VERSION}")


@lru_cache(maxsize=1)
def find() -> Library | str:
    """The best variant for this processor, or the reason why there is none."""
    reasons = []
    for variant in variants():
        for path in sorted(Path(__file__).parent.glob(f"_{variant}.*")):
            if path.suffix not in (".so", ".dylib", ".pyd"):
                continue
            try:
                return Library(path, variant)
            except (AttributeError, OSError) as error:
                reasons.append(str(error))
    return "; ".join(reasons) or "this installation was built without a C compiler"


def variants() -> tuple[str, ...]:
    """The variants that this processor supports, fastest first."""
    return _BEST_FIRST.get(torch.backends.cpu.get_cpu_capability(), ("baseline",))


def require() -> Library:
    """The library; an error if there is none."""
    found = find()
    if isinstance(found, str):
        raise FeddumapError(
            f"train.kernels = 'c' cannot be used here ({found}): {REMEDY}, or set train.kernels=torch"
        )
    return found


def described(kernels: str) -> str:
    """`train.kernels` with the variant for this processor."""
    found = find()
    return f"c ({found.variant})" if kernels == "c" and isinstance(found, Library) else kernels
