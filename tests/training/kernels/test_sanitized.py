"""The kernels in C on random chains (kernels/fuzz.c), under address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import setuptools

from feddumap.training.kernels import loader

ROOT = Path(__file__).parents[3]
CHAINS = 200
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: cc is not on the PATH"),
]


def build_settings() -> dict[str, list[str]]:
    """The compiler flags of every variant, as setup.py has them."""
    with mock.patch.object(setuptools, "setup"):
        made = runpy.run_path(str(ROOT / "setup.py"))
    return {variant: [*made["ARITHMETIC"], *flags] for variant, flags in made["VARIANTS"].items()}


@pytest.mark.parametrize("variant", loader.variants())
def test_random_chains_stay_inside_their_buffers(variant: str, tmp_path: Path) -> None:
    sources = sorted((ROOT / "src/feddumap/training/kernels").glob("*.c"))
    fuzz = tmp_path / "fuzz"
    # unrolled loops take sanitizers minutes to compile at -O3
    command = ["cc", "-O1", "-g", "-std=gnu11", "-Wno-psabi", *SANITIZERS, *build_settings()[variant]]
    files = [str(path) for path in (*sources, ROOT / "tests/training/kernels/fuzz.c")]
    subprocess.run([*command, *files, "-lm", "-o", str(fuzz)], check=True)
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1", "ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run(
        [str(fuzz), "1", str(CHAINS)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, f"the last chain and the report:\n{done.stderr[-6000:]}"
    assert f"{CHAINS} chains" in done.stdout
