"""Simulated hostile devices: who they are, what they train on and what they send."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feddumap import run as api
from feddumap.attacks import check_attack, hostile_devices
from feddumap.attacks.samples import flip_labels, plant_trigger, triggered, with_trigger
from feddumap.attacks.updates import noise, scaling, sign_flip
from feddumap.config import AttackConfig, Config
from feddumap.core.messages import Architecture, InputSpec, Upload
from feddumap.core.tensors import digest
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.engine.local import Evaluator
from feddumap.engine.rounds import broadcast_of
from feddumap.errors import FeddumapError
from feddumap.models import network
from feddumap.system.determinism import deterministic
from feddumap.training.samples import Samples, to_input
from tests.conftest import small
from tests.support.methods import config_of, outcome, resumed

START = {"w": torch.tensor([1.0, -2.0, 0.5]), "count": torch.tensor(3)}
TRAINED = {"w": torch.tensor([1.5, -2.0, 0.0]), "count": torch.tensor(9)}


def attacked(name: str, **keys: Any) -> Config:
    return small(attack={"name": name, "share": 0.5, **keys})


def test_the_hostile_devices_follow_from_the_seed() -> None:
    config = Config.parse({"attack": {"name": "noise", "share": 0.13}})
    found = hostile_devices(config)
    assert len(found) == 13
    assert found < set(range(100))
    assert found == hostile_devices(config.replace(attack={"name": "sign-flip"}))
    assert found != hostile_devices(config.replace(run={"seed": 1}))
    assert hostile_devices(Config()) == frozenset()


def test_false_updates() -> None:
    rng = np.random.default_rng(0)
    update = TRAINED["w"] - START["w"]
    assert torch.equal(sign_flip(TRAINED, START, 3.0, rng)["w"], START["w"] - 3 * update)
    assert torch.equal(scaling(TRAINED, START, 4.0, rng)["w"], START["w"] + 4 * update)
    assert torch.equal(scaling({"c/w": update}, {}, 4.0, rng)["c/w"], 4 * update)
    assert sign_flip(TRAINED, START, 3.0, rng)["count"].item() == 9
    many = {"w": torch.full((40_000,), 0.01)}
    noisy = noise(many, {"w": torch.zeros(40_000)}, 5.0, rng)["w"] - many["w"]
    assert float(noisy.norm() / many["w"].norm()) == pytest.approx(5.0, rel=0.02)
    assert abs(float(noisy.mean())) < 1e-3


def test_false_data() -> None:
    images = torch.from_numpy(np.random.default_rng(1).integers(0, 200, (20, 8, 8, 1), dtype=np.uint8))
    samples = Samples(images, torch.arange(20) % 10)
    assert flip_labels(samples, 10).targets.tolist() == [9 - label for label in samples.targets.tolist()]
    marked = with_trigger(images, 3)
    assert (marked[:, 5:, 5:] == 255).all()
    assert torch.equal(marked[:, :5], images[:, :5])
    assert torch.equal(marked[:, :, :5], images[:, :, :5])
    attack = AttackConfig(name="backdoor", target=4, trigger=3)
    planted = plant_trigger(samples, attack, np.random.default_rng(2))
    changed = (planted.inputs != samples.inputs).flatten(1).any(dim=1)
    assert int(changed.sum()) == 10
    assert (planted.targets[changed] == 4).all()
    assert torch.equal(planted.targets[~changed], samples.targets[~changed])
    tried = triggered(samples, attack)
    assert torch.equal(tried.inputs, marked[samples.targets != 4])
    assert tried.targets.unique().tolist() == [4]


def uploads(config: Config) -> tuple[api.Run, list[Upload]]:
    run = api.start(config)
    holdings = SplitHoldings(run.dataset, run.split, run.config.run.seed)
    executor = Executor(run.config, holdings, run._algorithm)
    message = replace(broadcast_of(run.state, run.config), extra=run._algorithm.send(run.state))
    with deterministic():
        return run, [executor.train(message, device, {})[0] for device in range(4)]


@pytest.mark.parametrize("name", ["label-flip", "sign-flip", "scaling", "noise", "backdoor"])
def test_hostile_devices_lie_and_the_others_do_not(home: object, name: str) -> None:
    run, found = uploads(attacked(name))
    _, honest = uploads(small())
    hostile = hostile_devices(run.config)
    assert {0, 1, 2, 3} & hostile
    for lie, truth in zip(found, honest, strict=True):
        assert (digest(lie.weights) != digest(truth.weights)) == (lie.device in hostile)
        assert (lie.samples, lie.steps) == (truth.samples, truth.steps)


def test_what_comes_along_is_false_too(home: object) -> None:
    sections: Any = {"method": {"name": "scaffold"}}
    run, found = uploads(attacked("sign-flip", scale=2.0).replace(**sections))
    _, honest = uploads(small(**sections))
    for lie, truth in zip(found, honest, strict=True):
        factor = -2.0 if lie.device in hostile_devices(run.config) else 1.0
        for name, tensor in truth.extra.items():
            assert torch.equal(lie.extra[name], factor * tensor)


def test_an_upload_without_a_plan_is_false_too(home: object) -> None:
    config = config_of("fedkt-iter", attack={"name": "sign-flip", "share": 0.5}, train={"rounds": 1})
    plain = config.replace(attack={"name": "none"})
    assert digest(api.train(config).state.weights) != digest(api.train(plain).state.weights)


def test_workers_and_resumes_agree(home: object, tmp_path: Path) -> None:
    config = attacked("noise")
    whole = api.train(config)
    _, again = resumed(config.replace(run={"workers": 2}), tmp_path / "run", 1)
    assert outcome(again) == outcome(whole)


def test_the_success_of_a_backdoor_is_recorded_and_trains_nothing(home: object) -> None:
    config = attacked("backdoor", target=3, scale=1.0).replace(train={"rounds": 2})
    run = api.train(config)
    labels = np.asarray(run.dataset.test_labels)
    others = torch.from_numpy(np.asarray(run.dataset.test_inputs)[labels != 3])
    model = network(run.state.architecture, run.state.weights).eval()
    with torch.inference_mode():
        predicted = model(to_input(with_trigger(others, 3))).argmax(dim=1)
    assert run.records[-1]["backdoor"] == pytest.approx(float((predicted == 3).float().mean()), abs=0.01)
    assert "backdoor" not in api.train(small(train={"rounds": 1})).records[0]
    other = api.start(config)
    other.dataset = replace(other.dataset, test_labels=(other.dataset.test_labels + 1) % 10)
    other.run()
    assert digest(other.state.weights) == digest(run.state.weights)
    assert other.records[-1]["accuracy"] != run.records[-1]["accuracy"]


def test_the_success_is_the_same_in_a_pool(home: object) -> None:
    config = attacked("backdoor").replace(train={"rounds": 1})
    pooled = api.train(config.replace(run={"workers": 2}))
    assert pooled.records[0]["backdoor"] == api.train(config).records[0]["backdoor"]
    score = Evaluator.of(pooled.dataset, pooled.split, pooled.config).whole(pooled.state)
    assert score.backdoor[1] == int((pooled.dataset.test_labels != 0).sum())


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"name": "noise", "share": 0.004}, "image", r"attack\.share = 0\.004 of data\.devices = 100 is no"),
        ({"name": "backdoor", "target": 10}, "image", r"attack\.target = 10 is no class: expected 0 to 9"),
        ({"name": "backdoor", "trigger": 9}, "image", r"attack\.trigger = 9 is larger than an image 1×8×8"),
        ({"name": "backdoor"}, "numbers", r"'backdoor' needs images, but the inputs are numbers 5"),
    ],
)
def test_attacks_that_cannot_be_made_are_refused(keys: Any, kind: Any, message: str) -> None:
    shape = InputSpec(kind, (1, 8, 8) if kind == "image" else (5,))
    config = Config.parse({"attack": keys})
    with pytest.raises(FeddumapError, match=message):
        check_attack(config, Architecture("mlp", 10, (), shape))


def test_a_refused_attack_writes_nothing(home: object, tmp_path: Path) -> None:
    with pytest.raises(FeddumapError, match=r"attack\.target = 10"):
        api.start(small(attack={"name": "backdoor", "target": 10, "share": 0.5}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
