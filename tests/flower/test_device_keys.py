"""Devices are bound to keys: nobody takes another device's place, whatever number a node gives."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from tests.support.flower import DEVICES, alike, config_of

pytest.importorskip("flwr", reason="needs the extra flower")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from flwr.app import ConfigRecord, Message, RecordDict

from feddumap import run as api
from feddumap.core.messages import MissingUpload, Question, Upload
from feddumap.engine.rounds import broadcast_of, take_census
from feddumap.errors import FeddumapError
from feddumap.flower import server
from feddumap.flower.device_keys import DeviceKeys, fingerprint, to_toml
from feddumap.flower.local import project
from feddumap.flower.transport import Transport
from tests.support.flower_grid import FakeGrid, FakeNode


def new_key() -> tuple[bytes, str]:
    """A public key as Flower gives it, and as the line of a key file."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem, key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() + " somebody@somewhere\n"


@pytest.fixture
def table(tmp_path: Path) -> tuple[DeviceKeys, list[bytes]]:
    """A table of the devices, and the keys in it."""
    keys = [new_key() for _ in range(DEVICES)]
    (tmp_path / "devices.toml").write_text(to_toml([line for _, line in keys]))
    return DeviceKeys.read(tmp_path / "devices.toml"), [pem for pem, _ in keys]


def grid_of(keys: list[bytes], tmp_path: Path) -> FakeGrid:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path / "state"))
    for device, key in enumerate(keys):
        grid.node(device).key = key
    return grid


def test_the_table_is_read_as_it_is_written(table: tuple[DeviceKeys, list[bytes]]) -> None:
    found, keys = table
    assert [found.device(key) for key in keys] == list(range(DEVICES))
    assert found.device(new_key()[0]) is None
    assert found.device(b"") is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"has no table \[devices\]"),
        ("[devices]\nx = 'y'\n", "'x' is not the number of a device"),
        ("[devices]\n0 = 'ssh-rsa nonsense'\n", "the key of device 0 is 'ssh-rsa nonsense', expected"),
        ("[devices]\n0 = 5\n", "the key of device 0 is '5', expected"),
        ("[devices\n", "is not valid TOML"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "devices.toml").write_text(text)
    with pytest.raises(FeddumapError, match=sentence):
        DeviceKeys.read(tmp_path / "devices.toml")


def test_a_key_belongs_to_one_device(tmp_path: Path) -> None:
    line = new_key()[1]
    (tmp_path / "devices.toml").write_text(to_toml([line, line]))
    with pytest.raises(FeddumapError, match="devices 0 and 1 have the same key SHA256:"):
        DeviceKeys.read(tmp_path / "devices.toml")


def test_init_writes_the_table_of_the_keys_it_makes(tmp_path: Path) -> None:
    made = project.create(tmp_path / "fed", 3)
    found = DeviceKeys.read(made.devices)
    for device in range(3):
        key = load_ssh_public_key((made.keys / f"node-{device}.pub").read_bytes())
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        assert found.device(pem) == device
        try:
            shown = subprocess.run(
                ["ssh-keygen", "-lf", str(made.keys / f"node-{device}.pub")],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        except FileNotFoundError:
            continue
        assert fingerprint(pem) in shown
    assert project.settings(made)["devices"] == str(made.devices)
    made.devices.unlink()  # as in a folder of an older version, whose app does not know the key
    assert "devices" not in project.settings(made)


def test_with_keys_the_bits_are_those_of_the_simulation(
    home: Path, tmp_path: Path, table: tuple[DeviceKeys, list[bytes]]
) -> None:
    run = api.start(config_of("fedavg"))
    run.engine = partial(server.cohort, grid_of(table[1], tmp_path), keys=table[0])
    alike(run.run(), api.train(config_of("fedavg", "local")))


def test_a_stolen_number_is_refused(
    home: Path,
    tmp_path: Path,
    table: tuple[DeviceKeys, list[bytes]],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A node with the valid key of device 3 says it is device 1, before and after device 1 is there."""
    keys, (_, _, _, own) = table
    grid = grid_of(table[1], tmp_path)
    thief, honest = grid.node(3), grid.node(1)
    thief.config["partition-id"] = 1
    honest.connected = False
    run = api.start(config_of("fedavg"))
    cohort = server.cohort(grid, run, keys=keys)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        census = take_census(cohort, run.state, run.config, "none")
    sentence = "it says it is device 1, but its key is device 3's"
    assert census.missing == {
        1: "it has no node: it never connected",
        3: f"its node is not used: {sentence}",
    }
    message = broadcast_of(run.state, run.config)
    assert "train" not in thief.kinds
    honest.connected = True
    cohort.survey(question := asking(), message, [1])
    assert question.optional
    first, second = cohort.train(message, [0, 1])
    assert isinstance(first, Upload)
    assert isinstance(second, Upload)
    assert honest.kinds.count("train") == 1
    (missing,) = list(cohort.survey(question, message, [3]))
    assert sentence in missing.lost
    assert "train" not in thief.kinds
    assert "query" not in thief.kinds
    said = capsys.readouterr().err
    assert said.count(f"not used: {sentence}") == 2  # of the node, and with the missing devices
    assert caplog.text.count(f"the server does not use this node: {sentence}") == 1
    thief.config["partition-id"], thief.since = 3, "later"  # its owner corrects it and starts it again
    (joined,) = list(cohort.survey(question, message, [3]))
    assert joined.values["samples"] == len(run.split.device(3))
    assert isinstance(next(iter(cohort.train(message, [3]))), Upload)
    assert own == thief.key


def asking() -> Question:
    return Question("census", {"labels": "none"}, light=True, optional=True)


def test_a_key_that_is_not_in_the_table(
    home: Path, tmp_path: Path, table: tuple[DeviceKeys, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not even asked; it is told why."""
    grid = grid_of(table[1], tmp_path)
    stranger, _ = new_key()
    grid.nodes[5] = FakeNode({"partition-id": 2, "state": str(tmp_path)}, key=stranger)
    grid.node(2).connected = False
    run = api.start(config_of("fedavg"))
    cohort = server.cohort(grid, run, keys=table[0])
    take_census(cohort, run.state, run.config, "none")
    found = list(cohort.train(broadcast_of(run.state, run.config), [1, 2]))
    assert [type(each) for each in found] == [Upload, MissingUpload]
    assert grid.nodes[5].kinds == ["query.refused"]
    said = capsys.readouterr().err
    assert said.count(f"node 5 is not used: its key {fingerprint(stranger)} is not in devices.toml") == 1


def test_the_ids_of_messages_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes a message's id from its content, and a reply needs it: the same content must give another
    id every time."""
    grid = FakeGrid.of(1, state=str(tmp_path))
    sent: list[str] = []
    original = FakeGrid.push_messages

    def push(self: FakeGrid, messages: Iterable[Message]) -> Iterable[str]:
        made = list(messages)
        for message in made:
            message.metadata.created_at = 0.0
            sent.append(message.object_id)
        return original(self, made)

    monkeypatch.setattr(FakeGrid, "push_messages", push)
    transport = Transport(grid)
    for _ in range(3):
        transport.send(RecordDict({"who": ConfigRecord({"token": "ab" * 16})}), 1000, "query.hello", 5.0)
    assert len(set(sent)) == 3


def test_without_a_table_the_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert server.read_keys({}) is None
    assert "devices are not bound to keys" in capsys.readouterr().err
    with pytest.raises(FeddumapError, match="cannot read the table of device keys"):
        server.read_keys({"devices": "/nowhere/devices.toml"})
