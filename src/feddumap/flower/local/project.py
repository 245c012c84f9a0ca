"""The folder of a federation: its Flower app, its configuration, its keys and a README."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from feddumap import run as api
from feddumap.config import Config, load
from feddumap.data.sources import catalog
from feddumap.errors import FeddumapError
from feddumap.flower.local.readme import README
from feddumap.methods import secure
from feddumap.methods.registry import compose, settings_model
from feddumap.system.atomic_files import write_text
from feddumap.system.callbacks import Say, ignore

NODES = 4  # of a federation to try
PATHS = (("data", "name"), ("data", "test"), ("model", "weights"), ("clock", "fleet"))
"""The keys that name files and folders."""
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
    def devices(self) -> Path:
        """The table of the devices' public keys."""
        return self.path / "devices.toml"

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


def new_config(
    nodes: int | None = None, sets: Sequence[str] = (), file: Path | None = None, say: Say = ignore
) -> Config:
    """The configuration of a new federation: that of a file, or a small one to try. Its data, network and
    method are checked as when a run starts. Without `nodes` there are as many as the file has devices."""
    if file is None:
        nodes = nodes or NODES
        config = example_config(nodes, sets)
    else:
        given = [] if nodes is None else [f"data.devices={nodes}"]
        config = load(file, [*given, "run.engine=flower", *sets])
    secure.check(config)
    checked = api.start(config, say=say).config
    if nodes is not None and checked.data.devices != nodes:
        raise FeddumapError(f"data.devices = {checked.data.devices}: expected the number of nodes, {nodes}")
    return _with_absolute_paths(config.replace(data={"devices": checked.data.devices}))


def _with_absolute_paths(config: Config) -> Config:
    """Every node opens these files and folders, wherever it was started."""
    found: dict[str, dict[str, str]] = {}
    for section, key in PATHS:
        value = getattr(getattr(config, section), key)
        if value and value not in catalog.NAMES and Path(value).expanduser().exists():
            found.setdefault(section, {})[key] = str(Path(value).expanduser().absolute())
    return config.replace(**found)


def example_config(nodes: int, sets: Sequence[str]) -> Config:
    """A small configuration to try, with these keys set: it prunes early."""
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
    plain = load(None, [*given, *sets])
    method = plain.method.name
    if compose(plain).updates and not (plain.privacy.on or plain.run.secure):
        given.append("aggregate.name=clipped")  # docs/robustness.md: it costs nothing without an attack
    keys = settings_model(method).model_fields
    if "degree" in keys:  # all devices take part: the cohort's degree is 0
        given.append("method.degree=device")
    if "prune_round" in keys:
        given.append("method.prune_round=2")
    return load(None, [*given, *sets])


def create(
    path: Path,
    nodes: int | None = None,
    hosts: Sequence[str] = (),
    sets: Sequence[str] = (),
    file: Path | None = None,
    say: Say = ignore,
) -> Project:
    """Create a folder with everything in it, or none at all; an existing folder is an error. For the other
    arguments see `new_config`."""
    from feddumap.flower import device_keys  # both need a package that comes with Flower
    from feddumap.flower.local import certificates

    if path.exists() or path.is_symlink():
        raise FeddumapError(f"{path} exists already: give the name of a folder that does not exist yet")
    config = new_config(nodes, sets, file, say)
    nodes = config.data.devices
    path.parent.mkdir(parents=True, exist_ok=True)
    final = path.parent.resolve() / path.name
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=final.parent))
    try:
        _fill(draft, final, config, nodes, hosts)
        certificates.make_all(draft / "keys", nodes, hosts)
        lines = [(draft / "keys" / f"node-{node}.pub").read_text(encoding="utf-8") for node in range(nodes)]
        write_text(Project(draft).devices, device_keys.to_toml(lines))
        token = (draft / "keys" / certificates.TOKEN).read_text(encoding="ascii")
        connect(draft / ".flower", f"127.0.0.1:{PORT}", final / "keys" / "ca.crt", token)
        draft.rename(final)  # only its owner may read it, as mkdtemp made it
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


def connect(home: Path, address: str, certificate: Path, token: str) -> None:
    """Write Flower's configuration in a new folder: where the SuperLink is and the token for its control
    interface, for the command `flwr`."""
    from feddumap.flower.local.certificates import private
    from feddumap.flower.local.control import credentials

    home.mkdir(mode=0o700)
    private(home / "credentials.yaml", credentials(address, token).encode())
    connection = {"address": address, "root-certificates": str(certificate)}
    value = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    write_text(home / "config.toml", tomli_w.dumps(value))


def settings(project: Project) -> dict[str, Any]:
    """The run configuration of the server's app: the configuration file, settings on top of it, the run
    directory, and the table of the devices' keys, which folders of older versions lack. `flwr run
    --run-config` may change these keys and no others."""
    value = {"config": str(project.path / "config.toml"), "sets": "", "out": str(project.run)}
    return value | ({"devices": str(project.devices)} if project.devices.exists() else {})


def _fill(draft: Path, final: Path, config: Config, nodes: int, hosts: Sequence[str]) -> None:
    address = f"{hosts[0] if hosts else 'SERVER'}:{PORT}"
    app = {
        "publisher": "feddumap",
        "fab-include": ["federation/*.py"],
        "components": {"serverapp": "federation.server:app", "clientapp": "federation.client:app"},
        "config": {**settings(Project(final)), "devices": str(Project(final).devices)},
    }
    pyproject = {
        "project": {
            "name": "feddumap-federation",
            "version": "1.0.0",
            "description": "Federated training with feddumap over Flower.",
            "license": "Apache-2.0",
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
