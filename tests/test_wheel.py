"""A wheel has the kernels inside: installing it needs no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: cc is not on the PATH"),
]

PROGRAM = """
import json
import feddumap
from feddumap.training.kernels import loader

heard = []
config = {"data": {"devices": 4}, "model": {"name": "lenet"}, "run": {"workers": 1},
          "train": {"rounds": 1, "cohort": 2, "epochs": 1}}
run = feddumap.start(config, say=heard.append).run()
print(json.dumps({"at": feddumap.__file__, "variant": loader.require().variant,
                  "kernels": run.config.train.kernels, "heard": heard, "rounds": run.state.round}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that nothing is left in this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    kept = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=kept)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_every_variant_and_its_sources(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name or "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")  # it is for one kind of machine
    inside = zipfile.ZipFile(wheel).namelist()
    folder = "feddumap/training/kernels/"
    variants = {Path(name).name.split(".")[0] for name in inside if name.endswith(".so")}
    expected = {"_baseline"}
    if sysconfig.get_platform().endswith("x86_64"):
        expected |= {"_avx2", "_avx512"}
    assert variants == expected
    assert f"{folder}chain.c" in inside


def test_an_install_without_a_compiler_trains_with_the_kernels(
    wheel: Path, home: Path, tmp_path: Path
) -> None:
    """In an environment of its own that borrows the other packages, with nothing on the PATH."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    target = tmp_path / "env" / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    bare = {"PATH": str(tmp_path / "nothing"), "HOME": str(tmp_path), "FEDDUMAP_HOME": str(home)}
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, env={**os.environ, **bare})
    borrowed = sysconfig.get_paths()["purelib"]
    environment = {**bare, "PYTHONPATH": os.pathsep.join([str(target), borrowed])}
    done = subprocess.run(
        [str(python), "-c", PROGRAM], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["at"]).is_relative_to(target)
    assert (found["kernels"], found["rounds"]) == ("c", 1)
    assert found["variant"] in ("avx512", "avx2", "baseline")
    assert not [said for said in found["heard"] if "slower" in said]
