"""Frozen tensors over Flower: sent once to each device, kept by it, and refused if they are others."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Message, RecordDict

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.messages import Architecture, Tensors
from feddumap.engine.rounds import broadcast_of
from feddumap.flower import codec, handshake, node, requests, server
from feddumap.flower.codec import Refused
from feddumap.flower.handshake import Hello
from feddumap.flower.requests import Request
from feddumap.models.frozen import constants_of
from feddumap.pruning import rates
from tests.support.flower import DEVICES, alike, config_of
from tests.support.flower_grid import FakeGrid
from tests.support.own_networks import FROZEN, name_of

MODEL = {"name": name_of("PartlyFrozen")}


@pytest.fixture(autouse=True)
def other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes know of frozen tensors what is in their files only."""
    monkeypatch.setattr(node, "is_known", lambda shape: not shape.frozen)
    monkeypatch.setattr(rates, "SAMPLES", 20)
    monkeypatch.setattr(rates, "STEPS", 8)


def watched(config: Config, folder: Path) -> tuple[api.Run, list[tuple[int, str]]]:
    """A run over a grid, and the frozen tensors that are sent: to which device, and their hash."""
    grid = FakeGrid.of(DEVICES, **{"state": str(folder), "allow-modules": True})
    sent: list[tuple[int, str]] = []

    def watch(message: Message, content: RecordDict) -> RecordDict:
        if "frozen" in message.content:
            order = message.content["order"]
            sent.append((order["device"], json.loads(order["architecture"])["frozen"]))  # type: ignore
        return content

    for each in grid.nodes.values():
        each.mischief = watch
    run = api.start(config)
    run.engine = partial(server.cohort, grid)
    return run, sent


@pytest.mark.parametrize("method", ["scaffold", "feddumap"])
def test_they_are_sent_once(home: Path, tmp_path: Path, method: str) -> None:
    """A cut does not change them. The bits and the bytes are the simulation's."""
    expected = api.train(config_of(method, "local", model=MODEL))
    run, sent = watched(config_of(method, model=MODEL), tmp_path)
    alike(run.run(), expected)
    assert run.state.architecture == expected.state.architecture
    assert len(sent) == len(set(sent))
    hashes = [digest for _, digest in sent]
    first, last = run.records[0]["devices"], run.records[-1]["devices"]
    assert {device for device, digest in sent if digest == hashes[0]} >= set(first)
    assert {device for device, digest in sent if digest == run.state.architecture.frozen} >= set(last)
    assert len(set(hashes)) == 1


def test_lost_ones_are_sent_again(home: Path, tmp_path: Path) -> None:
    train = {"rounds": 3, "cohort": DEVICES}
    run, sent = watched(config_of("fedavg", model=MODEL, train=train), tmp_path)
    records = run.iterate()
    next(records)
    assert sorted(device for device, _ in sent) == list(range(DEVICES))
    files = sorted(tmp_path.rglob("frozen-*.safetensors"))
    assert len(files) == DEVICES
    files[1].write_bytes(b"damaged")
    lost = next(records)["lost"]
    assert set(lost) == {"1"}
    assert "cannot read" in lost["1"]
    assert "lost" not in next(records)
    assert [device for device, _ in sent[DEVICES:]] == [1]


@pytest.fixture
def shape(home: Path) -> Architecture:
    return api.start(config_of("fedavg", "local", model=MODEL)).state.architecture


def message_of(shape: Architecture, sent: Tensors) -> RecordDict:
    return RecordDict({**codec.pack(frozen=sent)})


def test_others_are_refused(shape: Architecture) -> None:
    right = constants_of(shape)
    assert right.keys() == FROZEN
    found = requests.read_frozen(message_of(shape, right), shape)
    assert isinstance(found, dict)
    assert all(torch.equal(found[name], right[name]) for name in right)
    assert requests.read_frozen(RecordDict(), shape) is None
    for wrong, reason in [
        ({**right, "norm.bias": right["norm.bias"] + 1}, "are not those of its architecture"),
        ({**right, "norm.bias": right["norm.bias"][:3]}, "of another form"),
        ({**right, "head.bias": torch.zeros(10)}, "are not those expected"),
    ]:
        refused = requests.read_frozen(message_of(shape, wrong), shape)
        assert isinstance(refused, Refused)
        assert reason in refused.reason


def test_weights_come_without_them(home: Path) -> None:
    run = api.start(config_of("fedavg", "local", model=MODEL))
    shape = run.state.architecture
    assert requests.weights_forms(shape).keys() == run.state.weights.keys()
    assert requests.weights_forms(replace(shape, frozen="")).keys() == run.state.weights.keys() | FROZEN
    names = tuple(map(str, range(10)))
    request = Request("0" * 32, 0, 0, 0.1, shape, run.config, names, None)
    packed = requests.pack_broadcast(broadcast_of(run.state, run.config))
    content = requests.pack_request(request, packed, frozen=constants_of(shape))
    assert requests.read_request(content) == request
    bad = replace(request, architecture=replace(shape, frozen="../../x"))
    refused = requests.read_request(requests.pack_request(bad, packed))
    assert isinstance(refused, Refused)
    assert "not 64 hexadecimal digits" in refused.reason


def test_a_handshake_tells_their_hash() -> None:
    hello = Hello(1, False, False, "ab" * 32)
    assert handshake.read_hello(handshake.pack_hello(hello), 2) == hello
    refused = handshake.read_hello(handshake.pack_hello(replace(hello, frozen="/etc")), 2)
    assert isinstance(refused, Refused)
