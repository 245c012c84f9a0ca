"""The folder of a federation: its Flower app, its configuration, its keys and a README."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from feddumap.config import Config, load
from feddumap.errors import FeddumapError
from feddumap.flower.local.readme import README
from feddumap.methods.registry import compose, resolve
from feddumap.system.atomic_files import write_text

PORT = 9443
CONNECTION = "federation"  # the SuperLink's name in Flower's configuration
APP = {
    "__init__.py": "",
    "server.py": '"""What the server runs."""\n\nfrom feddumap.flower.server import server_app\n\n'
    "app = server_app()\n",
    "client.py": '"""What a device runs."""\n\nfrom feddumap.flower.client import client_app\n\n'
    "app = client_app()\n",
}
IGNORED = ("/keys/", "/logs/", "/run/", "/.flower/", "__pycache__/")


@dataclass(frozen=True)
class Project:
    """A federation's folder."""

    path: Path

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.path / "run"

    @property
    def home(self) -> Path:
        """The folder of Flower's own files, instead of ~/.flwr."""
        return self.path / ".flower"

    @property
    def nodes(self) -> int:
        """How many nodes have a key pair: node-0, node-1 and so on."""
        count = 0
        while (self.keys / f"node-{count}").is_file() and (self.keys / f"node-{count}.pub").is_file():
            count += 1
        return count

    def config(self) -> Config:
        return load(self.path / "config.toml")


def example_config(nodes: int, sets: Sequence[str]) -> Config:
    """A small configuration to try, with these keys set: it prunes early. The path of a data set is made
    absolute, as every node opens it."""
    name = load(None, sets).data.name
    digits = ["data.server_fraction=0.15", "data.server_classes=8", "data.augment=false"]
    given = [
        f"data.devices={nodes}",
        *(digits if name == "digits" else []),
        "model.name=lenet",
        "method.name=feddumap",
        "train.rounds=8",
        f"train.cohort={nodes}",
        "train.lr=0.05",
        "run.engine=flower",
    ]
    if compose(load(None, [*given, *sets])).updates:  # docs/robustness.md: it costs nothing without an attack
        given.append("aggregate.name=clipped")
    config = load(None, [*given, *sets])
    if config.method.name == "feddumap":
        config = load(None, [*given, "method.prune_round=2", *sets])
    if Path(name).exists():
        config = config.replace(data={"name": str(Path(name).absolute())})
    if config.data.devices != nodes:
        raise FeddumapError(f"data.devices = {config.data.devices}: expected the number of nodes, {nodes}")
    resolve(config.method)  # an unknown key is an error now
    return config


def create(path: Path, nodes: int, hosts: Sequence[str] = (), sets: Sequence[str] = ()) -> Project:
    """Create a folder with everything in it, or none at all; an existing folder is an error."""
    from feddumap.flower.local import certificates  # needs a package that comes with Flower

    if path.exists() or path.is_symlink():
        raise FeddumapError(f"{path} exists already: give the name of a folder that does not exist yet")
    config = example_config(nodes, sets)
    path.parent.mkdir(parents=True, exist_ok=True)
    final = path.parent.resolve() / path.name
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=final.parent))
    try:
        _fill(draft, final, config, nodes, hosts)
        certificates.make_all(draft / "keys", nodes, hosts)
        draft.chmod(0o755)
        draft.rename(final)
    except BaseException:
        shutil.rmtree(draft)
        raise
    return Project(final)


def opened(path: Path) -> Project:
    """An existing folder that `create` made."""
    project = Project(path.resolve())
    for name in ("pyproject.toml", "config.toml", "keys/ca.crt"):
        if not (project.path / name).is_file():
            raise FeddumapError(
                f"{path} holds no federation (it has no {name}): make one with `feddumap flower init {path}`"
            )
    return project


def connect(home: Path, address: str, certificate: Path) -> None:
    """Write Flower's configuration, which tells the command `flwr` where the SuperLink is."""
    home.mkdir(parents=True, exist_ok=True)
    connection = {"address": address, "root-certificates": str(certificate)}
    value = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    write_text(home / "config.toml", tomli_w.dumps(value))


def settings(project: Project) -> dict[str, Any]:
    """The run configuration of the server's app: the configuration file, settings on top of it, and the run
    directory. `flwr run --run-config` may change these keys and no others."""
    return {"config": str(project.path / "config.toml"), "sets": "", "out": str(project.run)}


def _fill(draft: Path, final: Path, config: Config, nodes: int, hosts: Sequence[str]) -> None:
    address = f"{hosts[0] if hosts else 'SERVER'}:{PORT}"
    app = {
        "publisher": "feddumap",
        "fab-include": ["federation/*.py"],
        "components": {"serverapp": "federation.server:app", "clientapp": "federation.client:app"},
        "config": settings(Project(final)),
    }
    pyproject = {
        "project": {
            "name": "feddumap-federation",
            "version": "1.0.0",
            "description": "Federated training with feddumap over Flower.",
            "dependencies": [],
        },
        "tool": {"flwr": {"app": app}},
    }
    (draft / "federation").mkdir()
    for name, text in APP.items():
        write_text(draft / "federation" / name, text)
    write_text(draft / "pyproject.toml", tomli_w.dumps(pyproject))
    chosen = config.model_dump(exclude_none=True, exclude_unset=True)
    write_text(draft / "config.toml", tomli_w.dumps(chosen))
    write_text(draft / ".gitignore", "".join(f"{name}\n" for name in IGNORED))
    write_text(draft / "README.md", README.format(path=final, address=address, port=PORT, last=nodes - 1))
    connect(draft / ".flower", f"127.0.0.1:{PORT}", final / "keys" / "ca.crt")
