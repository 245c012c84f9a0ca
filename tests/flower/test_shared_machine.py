"""What another user of the machine can do to a federation: connect, and be refused everywhere."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from feddumap.cli.main import app
from feddumap.errors import FeddumapError
from feddumap.runs.reader import read_records

pytest.importorskip("flwr", reason="needs Flower: pip install 'feddumap[flower]'")

from flwr.cli.auth_plugin import OidcCliPlugin
from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

from feddumap.flower import internals
from feddumap.flower.internals import ACCESS_TOKEN_KEY, config_loader
from feddumap.flower.local import access, project, superlink
from feddumap.flower.local.control import credentials, direct_control
from feddumap.flower.local.federation import Federation
from feddumap.flower.local.programs import DIRECT
from tests.support.flower_processes import QUICK, family, until

NOBODY = 65534
TOKEN = "0123456789abcdef" * 4
LOGIN = {f"/v1/control/{name}" for name in ("get-login-details", "get-auth-tokens", "refresh-auth-tokens")}
REFUSED = {401, 403}


def test_the_plugin_accepts_the_token_and_nothing_else() -> None:
    plugin = superlink.TokenPlugin(TOKEN)
    accepted, account = plugin.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, TOKEN)])
    assert accepted
    assert account is not None
    for wrong in ("", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "ä", TOKEN[:-1] + "\0"):
        assert plugin.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, wrong)]) == (False, None)
    assert plugin.validate_tokens_in_metadata([]) == (False, None)
    assert plugin.validate_tokens_in_metadata([("another-key", TOKEN)]) == (False, None)
    assert plugin.get_login_details() is None
    assert plugin.get_auth_tokens("a code") is None
    assert plugin.refresh_tokens([("flwr-oidc-refresh-token", TOKEN)]) == (None, None)


def test_flower_loads_the_plugin_or_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_loader, "get_control_authn_plugins", config_loader.get_control_authn_plugins)
    monkeypatch.setenv("FLWR_OIDC_ENABLED", "0")
    superlink.require_token(TOKEN)
    assert isinstance(config_loader.load_control_authn_plugin(), superlink.TokenPlugin)
    monkeypatch.setattr(config_loader, "get_control_authn_plugins", dict)
    with pytest.raises(SystemExit, match="unavailable"):
        config_loader.load_control_authn_plugin()


@pytest.mark.parametrize("text", [None, "", "short", "x" * 40 + " y", "ä" * 40])
def test_a_token_file_that_holds_none_is_an_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "control.token"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=r"--control-token-file .*control\.token: "):
        superlink.read_token(path)
    path.write_text(TOKEN + "\n")
    assert superlink.read_token(path) == TOKEN


def test_the_command_flwr_finds_the_token(tmp_path: Path) -> None:
    """By Flower's own store, in the file that `init` and `up` write."""
    made = project.create(tmp_path / "fed", 1)
    address, path = f"127.0.0.1:{project.PORT}", made.home / "credentials.yaml"
    assert path.read_text() == credentials(address, (made.keys / "control.token").read_text())
    store = FileCredentialStore(path)
    assert store.get(ACCESS_TOKEN_STORE_KEY % address) == (made.keys / "control.token").read_bytes()
    plugin = OidcCliPlugin(address)
    plugin.store = store
    plugin.load_tokens()
    sent = dict(plugin.write_tokens_to_metadata([]))
    assert superlink.TokenPlugin(
        superlink.read_token(made.keys / "control.token")
    ).validate_tokens_in_metadata(list(sent.items()))[0]


def test_a_folder_is_its_owners(tmp_path: Path) -> None:
    made = project.create(tmp_path / "fed", 1)
    for path in (made.path, made.keys, made.home):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    for path in (made.home / "credentials.yaml", made.keys / "control.token"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for path in (made.home, made.path / "logs"):  # one that was made with open folders is closed by `up`
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    found = Federation(made, cast("Any", SimpleNamespace()))
    for path in (made.home, made.path / "logs", found.home, found.home / "flwr"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


@pytest.mark.parametrize(
    ("others", "allowed", "refused"),
    [([], False, False), (["alice", "bob"], False, True), (["alice"], True, False)],
)
def test_an_open_flower_needs_a_machine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[str], allowed: bool, refused: bool
) -> None:
    """Or --shared-machine; nothing is started before."""
    made = project.create(tmp_path / "fed", 1)
    monkeypatch.setattr(internals, "MISSING", "config_loader has no load_control_authn_plugin")
    monkeypatch.setattr(access, "other_users", lambda: others)
    monkeypatch.setattr(Federation, "start", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("started")))
    result = CliRunner().invoke(
        app, ["flower", "up", str(made.path), *(["--shared-machine"] if allowed else [])]
    )
    if refused:
        assert isinstance(result.exception, FeddumapError)
        for part in ("alice, bob", "load_control_authn_plugin", "--shared-machine"):
            assert part in str(result.exception)
    else:
        assert "started" in str(result.exception)


def test_a_superlink_that_ignores_the_token_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = project.create(tmp_path / "fed", 1)
    monkeypatch.setattr(internals.ControlHttpClient, "ListRuns", lambda *_: None)
    with pytest.raises(FeddumapError, match="accepts control requests without the token"):
        access.check_closed("127.0.0.1:9", made.keys / "ca.crt")


def listening(pids: set[int]) -> tuple[list[int], list[str]]:
    """The TCP ports and the unix sockets at which processes listen."""
    inodes = set()
    for pid in pids:
        try:
            links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        if Path(f"/proc/net/{name}").exists()
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    ports = {int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted(ports), sorted({row[7] for row in unix if len(row) > 7 and row[6] in inodes})


@pytest.fixture
def live(prepared_home: Path, tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A federation that is up, in a folder that other users can find."""
    for folder in [tmp_path, *tmp_path.parents][:3]:
        folder.chmod(0o755)
    folder = tmp_path / "fed"
    project.create(folder, 2, sets=[*QUICK, "method.name=fedavg", "train.rounds=500"])
    process = subprocess.Popen(
        [sys.executable, "-m", "feddumap", "flower", "up", str(folder)],
        env={**os.environ, "FEDDUMAP_HOME": str(prepared_home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield folder, process
    process.terminate()
    process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self").exists() or os.geteuid() != 0, reason="becomes another user: needs root and /proc"
)
def test_another_user_is_refused_everywhere(live: tuple[Path, subprocess.Popen[str]]) -> None:
    """Every request that Flower knows, at every port and socket of every process; every file."""
    folder, process = live
    until(lambda: read_records(folder / "run") or process.poll() is not None, "a round")
    assert process.poll() is None, process.communicate()[0]
    members = family(process.pid)
    ports, sockets = listening(members)
    assert len(ports) == 3, ports  # the SuperLink's and two SuperNodes'
    token = (folder / ".flower" / "up" / "control.token").read_text()
    asked = {
        "uid": NOBODY,
        "ports": ports,
        "sockets": sockets,
        "paths": [str(folder), *map(str, folder.rglob("*"))],
        "pids": sorted(members),
        "tokens": ["x", TOKEN, token[:-1]],
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.stranger"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["uid"] == NOBODY
    assert found["sockets"] == []
    assert found["files"] == []
    secrets = [token, (folder / ".flower" / "up" / "node.secret").read_bytes().decode("latin-1")]
    tried = 0
    for port, answers in found["answers"].items():
        assert isinstance(answers["plain"], str), f"{port} speaks HTTP without TLS"
        assert not any(secret in body for body in answers["bodies"] for secret in secrets)
        for credential in ("bare", "signed", "token 0", "token 1", "token 2"):
            for path, status in answers[credential].items():
                tried += 1
                if path in LOGIN:  # these need no token, and give none
                    assert status in {200, 400, 401, 403, 404}, (port, credential, path, status)
                elif status == 404:  # SuperNodes have neither control nor fleet
                    assert int(port) != superlink_port(ports, found), (path, status)
                else:
                    assert status in REFUSED, (port, credential, path, status)
    assert tried > 500
    shown = "".join(found["processes"].values())
    assert str(folder) in shown  # command lines can be read, and hold no secret
    assert not any(secret in shown for secret in secrets)
    assert "--token" not in shown
    # the same request is answered with the token: what was refused above is not refused to everybody
    address = f"127.0.0.1:{superlink_port(ports, found)}"
    with direct_control(address, folder / "keys" / "ca.crt", DIRECT, token) as control:
        assert not control.refused()
    assert process.poll() is None


def superlink_port(ports: list[int], found: dict[str, Any]) -> int:
    """The port at which control requests are known."""
    (port,) = [each for each in ports if found["answers"][str(each)]["bare"]["/v1/control/list-runs"] != 404]
    return port
