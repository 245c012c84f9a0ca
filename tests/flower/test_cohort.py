"""Devices behind Flower's nodes: the simulation's bits, and no node that hangs or spoils a round."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.flower import DEVICES, METHODS, alike, config_of

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import ConfigRecord, Error, Message, RecordDict

from feddumap import run as api
from feddumap.cli import main as cli
from feddumap.config import Config, DataConfig, MethodConfig
from feddumap.core.messages import MissingUpload, Question, Upload
from feddumap.engine.rounds import broadcast_of, take_census
from feddumap.errors import FeddumapError
from feddumap.flower import codec, requests, server
from feddumap.flower import cohort as cohort_module
from feddumap.flower.cohort import FlowerCohort
from feddumap.flower.node import Node
from feddumap.flower.transport import SEND_TRIES
from feddumap.pruning import rates
from feddumap.sweep.grid import cells
from tests.support.flower_grid import FakeGrid, FakeNode, Mischief


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning rates from a shorter look at the curvature; what is said of them is the same."""
    monkeypatch.setattr(rates, "SAMPLES", 20)
    monkeypatch.setattr(rates, "STEPS", 8)


def over(grid: FakeGrid, config: Config, out: Path | None = None) -> api.Run:
    run = api.start(config, out) if out is None or not out.exists() else api.begin(config, out)
    run.engine = partial(server.cohort, grid)
    return run


@pytest.mark.parametrize("method", METHODS)
def test_flower_and_simulation_agree_bit_for_bit(home: Path, tmp_path: Path, method: str) -> None:
    few = {"rounds": 4, "cohort": 2}
    expected = api.train(config_of(method, "local", train=few))
    found = over(FakeGrid.of(DEVICES, state=str(tmp_path)), config_of(method, train=few)).run()
    alike(found, expected)
    pruned = [record["round"] for record in found.records if "pruning" in record]
    assert pruned == {"feddumap": [2], "prunefl": [0, 2]}.get(method, [])


@pytest.mark.parametrize("rule", ["clipped", "trust"])
def test_attacks_and_defences_agree_bit_for_bit(home: Path, tmp_path: Path, rule: str) -> None:
    sections: Any = {
        "train": {"rounds": 3, "cohort": DEVICES},
        "aggregate": {"name": rule, "multiple": 1.0},
        "attack": {"name": "noise", "share": 0.34},
    }
    expected = api.train(config_of("scaffold", "local", **sections))
    found = over(FakeGrid.of(DEVICES, state=str(tmp_path)), config_of("scaffold", **sections)).run()
    alike(found, expected)
    assert all(record["clipped"] for record in found.records)


def test_batch_norms_counters_are_carried(home: Path, tmp_path: Path) -> None:
    """And a network of one's own may be used where the nodes' owners allow it."""
    config = config_of("fedavg", "local", clock={"profile": "general"})
    config = config.replace(model={"name": "tests.support.own_model:make"})
    expected = api.train(config)
    assert int(expected.state.weights["1.num_batches_tracked"]) > 0
    grid = FakeGrid.of(DEVICES, **{"state": str(tmp_path), "allow-modules": True})
    alike(over(grid, config.replace(run={"engine": "flower"})).run(), expected)


def own_nodes(grid: FakeGrid, run: api.Run, folder: Path) -> None:
    """Give each node its part of the data set as data of its own."""
    for k in range(DEVICES):
        indices = run.split.device(k)
        images, labels = run.dataset.train_inputs[indices], run.dataset.train_labels[indices]
        np.savez(folder / f"{k}.npz", images=images, labels=labels)
        grid.node(k).config["data"] = str(folder / f"{k}.npz")


def test_users_of_a_table_are_devices(home: Path, tmp_path: Path) -> None:
    """Nodes read and split the same file; the server scores each device on its own test samples."""
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.normal() + 2 * (i % 2):.4f},{rng.normal():.4f},{'ab'[i % 2]},u{i % DEVICES}"
        for i in range(120)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,kind,who", *rows]) + "\n")
    keys = {"label": "kind", "user": "who", "partition": "natural", "devices": DEVICES}
    config = config_of("fedavg", "local", clock={"profile": "general"}, model={"name": "mlp"})
    config = config.replace(data={"name": str(tmp_path / "t.csv"), **keys})
    expected = api.train(config)
    assert expected.records[-1]["device_accuracy"]["devices"] == DEVICES
    grid = FakeGrid.of(DEVICES, state=str(tmp_path / "state"))
    alike(over(grid, config.replace(run={"engine": "flower"})).run(), expected)


@pytest.mark.parametrize("method", ["scaffold", "data-sharing"])
def test_devices_with_data_of_their_own(home: Path, tmp_path: Path, method: str) -> None:
    """The same images from elsewhere give the same bits; those that the server shares are sent once."""
    expected = api.train(config_of(method, "local"))
    grid = FakeGrid.of(DEVICES, state=str(tmp_path / "state"))
    own_nodes(grid, expected, tmp_path)
    gifts: list[int] = []

    def watch(message: Message, content: RecordDict) -> RecordDict:
        if "gift" in message.content:
            gifts.append(int(message.content["order"]["device"]))  # type: ignore[call-overload, arg-type]
        return content

    for node in grid.nodes.values():
        node.mischief = watch
    alike(over(grid, config_of(method)).run(), expected)
    chosen = {device for record in expected.records for device in record["devices"]}
    assert sorted(gifts) == (sorted(chosen) if method == "data-sharing" else [])


def test_lost_shared_images_are_sent_again(home: Path, tmp_path: Path) -> None:
    """A device that lost its folder is left out once, says why, and then has the images again."""
    expected = api.train(config_of("data-sharing", "local"))
    grid = FakeGrid.of(DEVICES, state=str(tmp_path / "state"))
    own_nodes(grid, expected, tmp_path)
    run = over(grid, config_of("data-sharing"))
    records = run.iterate()
    first = next(records)
    device = next(k for k in first["devices"] if k in expected.records[1]["devices"])
    for gift in tmp_path.glob(f"state/*/{device:06d}/gift.safetensors"):
        gift.unlink()
    second = next(records)
    assert "images that the server shares are missing" in second["lost"][str(device)]
    rest = [record for record in records if device in record["devices"]]
    assert all("lost" not in record for record in rest)


# losses


def to_training(change: Mischief) -> Mischief:
    """Mischief with training only: the node says hello as it should."""
    return lambda message, content: (
        change(message, content) if message.metadata.message_type == "train" else content
    )


def upload_with(**values: Any) -> Mischief:
    def change(_: Message, content: RecordDict) -> RecordDict:
        content["upload"] = ConfigRecord({**dict(content["upload"]), **values})
        return content

    return to_training(change)


def weights_with(change: Any) -> Mischief:
    def spoil(_: Message, content: RecordDict) -> RecordDict:
        weights = codec.unpack(content, "weights", lambda _: None)
        content.update(codec.pack(weights={**weights, "fc3.bias": change(weights["fc3.bias"])}))
        return content

    return to_training(spoil)


LOSSES: dict[str, tuple[Mischief, str]] = {
    "late": (to_training(lambda *_: None), "it did not answer within 0.4 s"),
    "dead": (to_training(lambda *_: Error(3, "node\nunavailable")), "its node failed (node unavailable)"),
    "NaN": (weights_with(lambda bias: bias * torch.nan), "its model diverged"),
    "wrong shape": (weights_with(lambda bias: bias[:-1]), "another form"),
    "wrong device": (upload_with(device=0), "it is of device 0"),
    "stale round": (upload_with(round=7), "it is of round 7"),
    "too many samples": (upload_with(samples=10**6), "its samples is '1000000'"),
    "garbage": (to_training(lambda *_: RecordDict()), "no record 'upload'"),
}


@pytest.fixture
def run(home: Path) -> api.Run:
    return api.start(config_of("fedavg"))


def cohort_of(run: api.Run, grid: FakeGrid) -> FlowerCohort:
    made = server.cohort(grid, run)
    take_census(made, run.state, run.config, "none")
    return made


@pytest.mark.parametrize("name", LOSSES)
def test_a_bad_device_is_left_out_and_named(run: api.Run, tmp_path: Path, name: str) -> None:
    mischief, reason = LOSSES[name]
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    message = broadcast_of(run.state, run.config)
    grid.node(2).mischief = mischief
    first, second, third = cohort.train(message, [0, 2, 3])
    assert isinstance(first, Upload)
    assert isinstance(third, Upload)
    assert isinstance(second, MissingUpload)
    assert (first.device, second.device, third.device) == (0, 2, 3)
    assert reason in second.reason
    grid.node(2).mischief = FakeNode({}).mischief
    assert [type(each) for each in cohort.train(message, [0, 2, 3])] == [Upload] * 3  # and it is back


def test_a_loss_is_in_the_record(home: Path, tmp_path: Path) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path / "state"))
    grid.node(1).mischief = LOSSES["NaN"][0]
    run = over(grid, config_of("fedavg"), tmp_path / "run").run()
    run.close()
    lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        assert 1 not in record["devices"]
        assert record.get("lost", {}) in ({}, {"1": "its model diverged (NaN or infinite)"})
        assert len(record["devices"]) + len(record.get("lost", {})) == 3
    assert any("lost" in record for record in records)


def test_below_the_share_the_missing_are_asked_again(run: api.Run, tmp_path: Path) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    tries: list[int] = []

    def twice(message: Message, content: RecordDict) -> RecordDict | None:
        tries.append(message.metadata.dst_node_id)
        return content if len(tries) > 3 else None

    for k in (1, 2):
        grid.node(k).mischief = to_training(twice)
    found = list(cohort.train(broadcast_of(run.state, run.config), [0, 1, 2]))
    assert [type(each) for each in found] == [Upload, MissingUpload, Upload]
    assert len(tries) == 4
    assert grid.node(0).kinds.count("train") == 1  # a device that replied is not asked again


def test_after_three_tries_the_round_ends_with_a_sentence(run: api.Run, tmp_path: Path) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    for node in grid.nodes.values():
        node.mischief = to_training(lambda *_: None)
    began = time.monotonic()
    sentence = (
        r"^round 0: 0 of 3 devices replied as expected when asked to train, 2 were needed "
        r"\(run.least_share = 0.5\), in 3 tries "
        r"\(device 0: it did not answer within 0.4 s; .*: fix the nodes, then resume$"
    )
    with pytest.raises(FeddumapError, match=sentence):
        list(cohort.train(broadcast_of(run.state, run.config), [0, 1, 2]))
    assert time.monotonic() - began < 10
    assert grid.node(0).kinds.count("train") == 3


def test_a_question_that_is_not_partial_needs_every_answer(run: api.Run, tmp_path: Path) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    del grid.nodes[1000 - 7 * 3]
    question = Question("census", {"labels": "none"}, light=True)
    sentence = (
        r"3 of 4 devices replied as expected when asked 'census', 4 .* "
        r"\(device 3: it has no node: its node disconnected\)"
    )
    with pytest.raises(FeddumapError, match=sentence):
        cohort.survey(question, broadcast_of(run.state, run.config), range(DEVICES))


def test_a_pruning_goes_on_without_a_devices_rate(home: Path, tmp_path: Path) -> None:
    """Its rate is left out, with the reason in the record; the device trains again afterwards."""

    def no_rate(message: Message, content: RecordDict) -> RecordDict | Error | None:
        asked = message.content.get("question", ConfigRecord())
        return None if asked.get("name") == "rate" else content

    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    grid.node(2).mischief = no_rate
    config = config_of("feddumap", train={"rounds": 2, "cohort": 4})
    config = config.replace(method={"prune_round": 1, "rate_nodes": "all"})
    records = over(grid, config).run().records
    assert records[1]["lost"] == {"2": "it did not answer within 0.4 s"}
    assert [node["device"] for node in records[1]["pruning"]["nodes"]] == [-1, 0, 1, 3]
    assert records[1]["devices"] == [0, 1, 2, 3]
    assert records[1]["parameters"] < records[0]["parameters"]


def test_a_device_without_a_node_is_missing_and_may_come_back(run: api.Run, tmp_path: Path) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    message = broadcast_of(run.state, run.config)
    grid.node(2).connected = False
    found = list(cohort.train(message, [1, 2, 3]))
    assert found[1] == MissingUpload(2, "it has no node: its node disconnected")
    grid.nodes[5] = FakeNode({"partition-id": 2, "state": str(tmp_path)})  # under another id
    assert [type(each) for each in cohort.train(message, [1, 2, 3])] == [Upload] * 3
    assert grid.nodes[5].kinds == ["query.hello", "train"]


def test_a_retry_waits_for_nodes(run: api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    for k in (1, 2):
        grid.node(k).connected = False
    looks = 0
    original = FakeGrid.get_node_ids

    def counted(self: FakeGrid) -> Any:
        nonlocal looks
        looks += 1
        if looks > 2:
            for node in grid.nodes.values():
                node.connected = True
        return original(self)

    monkeypatch.setattr(FakeGrid, "get_node_ids", counted)
    found = list(cohort.train(broadcast_of(run.state, run.config), [0, 1, 2]))
    assert [type(each) for each in found] == [Upload] * 3


def test_two_nodes_that_are_one_device(
    run: api.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first stays as long as it answers; then the other takes its place."""
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    message = broadcast_of(run.state, run.config)
    grid.nodes[5] = FakeNode({"partition-id": 2, "state": str(tmp_path)})
    assert len(list(cohort.train(message, [1, 2]))) == 2
    assert grid.nodes[5].kinds == ["query.hello", "query.refused"]
    assert (
        "node 5 is not used: it says it is device 2, which another node is already" in capsys.readouterr().err
    )
    grid.nodes[6] = FakeNode({"partition-id": 2, "state": str(tmp_path)})
    grid.node(2).mischief = lambda *_: None  # connected, and dead
    list(cohort.train(message, [1, 2]))
    assert isinstance(list(cohort.train(message, [1, 2]))[1], Upload)
    assert "train" in grid.nodes[6].kinds


def test_nodes_without_a_number_are_not_used(
    run: api.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    grid.nodes[3] = FakeNode({})
    grid.nodes[4] = FakeNode({"partition-id": DEVICES})
    cohort = cohort_of(run, grid)
    assert len(list(cohort.train(broadcast_of(run.state, run.config), [0, 1]))) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "node 3 is not used: it did not say which device it is: it refused: this node's partition-id is None"
        in said
    )
    assert "node 4 is not used: it did not say which device it is: its device is '4'" in said
    assert grid.nodes[3].kinds == ["query.hello"]


def test_a_reply_that_flower_cannot_read(
    run: api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that device's loss, and nobody else's."""
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    original = FakeGrid.pull_messages
    broken = 1000 - 7 * 1

    def pull(self: FakeGrid, message_ids: Any) -> Any:
        found = list(original(self, message_ids))
        if any(reply.metadata.src_node_id == broken for reply in found):
            raise KeyError("arraychunk_ids")
        return found

    monkeypatch.setattr(FakeGrid, "pull_messages", pull)
    found = list(cohort.train(broadcast_of(run.state, run.config), [0, 1, 2]))
    assert [type(each) for each in found] == [Upload, MissingUpload, Upload]
    assert "its reply cannot be read (KeyError" in str(found[1])


def test_a_message_whose_sending_fails_is_sent_anew(
    run: api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the SuperLink is restarted while a message is sent; an error that stays is raised."""
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    original = FakeGrid.push_messages
    failures = {"train": 1}

    def push(self: FakeGrid, messages: Any) -> Any:
        (message,) = messages
        kind = message.metadata.message_type
        if failures.get(kind, 0):
            failures[kind] -= 1
            raise RuntimeError("the push session may have expired")
        return original(self, messages)

    monkeypatch.setattr(FakeGrid, "push_messages", push)
    found = list(cohort.train(broadcast_of(run.state, run.config), [0, 1, 2]))
    assert [type(each) for each in found] == [Upload] * 3
    assert [grid.node(device).kinds.count("train") for device in range(3)] == [1, 1, 1]
    failures["train"] = SEND_TRIES
    with pytest.raises(RuntimeError, match="may have expired"):
        list(cohort.train(broadcast_of(run.state, run.config), [0]))


# what a device does not do


def reply_of(grid: FakeGrid, node: int, kind: str, content: RecordDict) -> RecordDict:
    (sent,) = grid.push_messages([Message(content, node, kind)])
    (reply,) = grid.pull_messages([sent])
    return reply.content


def test_a_server_cannot_name_code_to_run(run: api.Run, tmp_path: Path) -> None:
    grid = FakeGrid.of(1, state=str(tmp_path))
    tensors = requests.pack_broadcast(broadcast_of(run.state, run.config))
    order = requests.Request(
        "ab" * 16, 0, 0, 0.1, run.state.architecture, run.config, run.dataset.classes, None
    )
    evil = order.config.model_copy(update={"method": MethodConfig(name="os:system")})

    def reason(order: requests.Request) -> str:
        content = reply_of(grid, 1000, "train", requests.pack_request(order, tensors))
        return str(content["refusal"]["reason"]) if "refusal" in content else "done"  # type: ignore[call-overload]

    assert reason(order) == "done"
    assert "method.name = 'os:system' names code to run on this device" in reason(replace(order, config=evil))
    made = order.config.model_copy(update={"data": DataConfig(name="os:getcwd")})
    assert "data.name = 'os:getcwd' names code to run on this device" in reason(replace(order, config=made))
    shape = replace(order.architecture, family="tests.support.own_model:make")
    assert "model.name = 'tests.support.own_model:make' names code" in reason(
        replace(order, architecture=shape)
    )
    assert "the architecture is a 'cnn', not model.name = 'lenet'" in reason(
        replace(order, architecture=replace(shape, family="cnn"))
    )
    grid.node(0).config["allow-modules"] = True
    missing = order.config.model_copy(update={"method": MethodConfig(name="no_such_module:method")})
    assert "method 'no_such_module:method' cannot be imported" in reason(replace(order, config=missing))
    assert reason(replace(order, device=1)) == "this node is device 0, not 1"


def test_what_a_nodes_owner_can_set(tmp_path: Path) -> None:
    node = Node.read({"partition-id": 3, "data": "~/pictures", "state": str(tmp_path), "allow-modules": True})
    assert (node.device, node.data, node.state, node.modules) == (
        3,
        Path("~/pictures").expanduser(),
        tmp_path,
        True,
    )
    assert node.folder("ab" * 16) == tmp_path / ("ab" * 16) / "000003"
    for bad in ({}, {"partition-id": "3"}, {"partition-id": -1}, {"partition-id": True}):
        with pytest.raises(FeddumapError, match=r"partition-id is .*expected the device's number"):
            Node.read(bad)
    with pytest.raises(FeddumapError, match="allow-modules is 'yes': expected true or false"):
        Node.read({"partition-id": 3, "allow-modules": "yes"})


# interruption


@pytest.mark.parametrize("method", ["scaffold", "prunefl"])
def test_kill_and_resume(home: Path, tmp_path: Path, method: str) -> None:
    """Server and nodes begin anew in the middle: the devices remember, and the bits are the same."""
    expected = api.train(config_of(method, "local"))
    out = tmp_path / "run"
    first = over(FakeGrid.of(DEVICES, state=str(tmp_path / "state")), config_of(method), out)
    records = first.iterate()
    for _ in range(2):
        next(records)
    first.close()
    del records, first
    token = (out / "token").read_text()
    again = over(FakeGrid.of(DEVICES, state=str(tmp_path / "state")), config_of(method), out)
    assert again.state.round == 2
    alike(again.run(), expected)
    assert (out / "token").read_text() == token
    assert [path.name for path in (tmp_path / "state").iterdir()] == [token.strip()]
    again.close()


def test_begin_refuses_another_run(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    over(FakeGrid.of(DEVICES, state=str(tmp_path / "state")), config_of("fedavg"), out).run().close()
    finished = api.begin(config_of("fedavg", run={"timeout": 9.0}), out)
    assert finished.finished
    assert finished.config.run.timeout == 9.0
    finished.close()
    with pytest.raises(FeddumapError, match="belongs to another configuration"):
        api.begin(config_of("fedavg", run={"seed": 3}), out)


@pytest.mark.parametrize("method", ["scaffold", "feddum"])
def test_a_finished_run_goes_on_with_more_rounds(home: Path, tmp_path: Path, method: str) -> None:
    """Raising train.rounds is enough; the bits are those of a run that had as many from the start."""
    expected = api.train(config_of(method, "local", train={"rounds": 4, "cohort": 3}))
    out, state = tmp_path / "run", str(tmp_path / "state")
    fewer = config_of(method, train={"rounds": 2, "cohort": 3})
    over(FakeGrid.of(DEVICES, state=state), fewer, out).run().close()
    again = over(FakeGrid.of(DEVICES, state=state), config_of(method, train={"rounds": 4, "cohort": 3}), out)
    assert (again.state.round, again.finished) == (2, False)
    alike(again.run(), expected)
    again.close()
    with pytest.raises(
        FeddumapError, match=r"train.rounds is 4 there, 2 here\): undo that \(only train.rounds"
    ):
        api.begin(fewer, out)


def test_the_servers_settings(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[data]\ndevices = 4\n[model]\nname = "lenet"\n[train]\nrounds = 1\ncohort = 2\nepochs = 1\n'
    )
    settings = {
        "config": str(file),
        "out": str(tmp_path / "run"),
        "sets": "train.lr=0.05 run.seed=5 run.timeout=5",
    }
    config, out = server.read_settings(settings)
    assert (config.run.engine, config.run.seed, config.train.lr, out) == ("flower", 5, 0.05, tmp_path / "run")
    with pytest.raises(FeddumapError, match="has no out"):
        server.read_settings({})
    grid = FakeGrid.of(4, state=str(tmp_path / "state"))
    server.run_app(grid, settings)
    assert (tmp_path / "run" / "summary.json").exists()
    server.run_app(grid, settings)  # nothing left to do
    assert "resuming after 1 of 1 rounds" in capsys.readouterr().err


# configuration


def test_engines_in_the_configuration(home: Path, tmp_path: Path) -> None:
    engines = ("local", "flower", "ray")
    assert {api.start(config_of("fedavg", engine)).config.train.kernels for engine in engines} == {"c"}
    with pytest.raises(FeddumapError, match=r"run.engine = 'flower': expected local or ray"):
        api.start(config_of("fedavg")).run()


def test_the_engine_is_not_what_a_run_is(home: Path, tmp_path: Path) -> None:
    """Like the number of workers: a run may be resumed with another, and a grid does not vary it."""
    config = config_of("fedavg", "local")
    api.train(config, tmp_path / "run").close()
    with pytest.raises(FeddumapError, match="holds this run already"):
        api.start(config.replace(run={"engine": "ray", "timeout": 1.0}), tmp_path / "run")
    file = tmp_path / "grid.toml"
    file.write_text('[grid]\n"run.engine" = ["local", "ray"]\n')
    with pytest.raises(FeddumapError, match=r"grid key run\.engine changes no result"):
        cells(file, tmp_path / "grid")


def test_train_says_how_to_use_flower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["feddumap", "train", "--set", "run.engine=flower", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "use `feddumap flower up`, or `flwr run`" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_questions_tries_are_bounded(run: api.Run, tmp_path: Path) -> None:
    grid = FakeGrid.of(DEVICES, state=str(tmp_path))
    cohort = cohort_of(run, grid)
    with pytest.raises(FeddumapError, match=r"when asked 'secrets'.*it refused: unknown question 'secrets'"):
        list(cohort.survey(Question("secrets"), broadcast_of(run.state, run.config), [0]))
    assert grid.node(0).kinds.count("query") == 1 + cohort_module.TRIES
