"""The kernels in C, a shared library for each kind of processor. Everything else is in pyproject.toml.

They are optional: without a compiler the package is installed without them and trains with torch. The
libraries are loaded by ctypes (`feddumap.training.kernels.loader`), so they need no Python headers and suit
every version of Python.
"""

import os
import platform
from copy import copy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/feddumap/training/kernels")
ARITHMETIC = ["-fno-math-errno", "-ffp-contract=fast"]
PLAIN = ["-O3", "-g0", "-std=gnu11", *ARITHMETIC, "-fvisibility=hidden", "-Wno-psabi"]
VARIANTS: dict[str, list[str]] = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    VARIANTS["avx2"] = ["-mavx2", "-mfma"]
    VARIANTS["avx512"] = ["-march=skylake-avx512", "-mprefer-vector-width=256"]


class Build(build_ext):
    """Variants side by side, on as many cores as there are."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        """In a folder of its own: the variants have the same sources."""
        own = copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        super(Build, own).build_extension(ext)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)  # there is no PyInit to export


setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        Extension(
            f"feddumap.training.kernels._{variant}",
            sources=sorted(str(path) for path in FOLDER.glob("*.c")),
            depends=sorted(str(path) for path in FOLDER.glob("*.h")),
            extra_compile_args=[*PLAIN, *flags],
            libraries=["m"],
            py_limited_api=True,
            optional=True,
        )
        for variant, flags in VARIANTS.items()
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
