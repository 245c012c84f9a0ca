"""Trust: the server's images of a device's classes tell whether it trained on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from feddumap import run as api
from feddumap.attacks import hostile_devices
from feddumap.core.algorithm import Census, RoundView
from feddumap.core.messages import Upload
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError
from feddumap.models import network
from feddumap.screening.trust import IMAGES, Trust, class_losses, examined, rise
from feddumap.system.determinism import deterministic
from feddumap.training.samples import Samples, to_input
from tests.conftest import small


def trusting(**sections: dict[str, Any]) -> api.Run:
    return api.start(small(aggregate={"name": "trust"}, data={"server_fraction": 0.25}).replace(**sections))


def view_of(run: api.Run) -> RoundView:
    server = Samples.take(run.dataset.train_inputs, run.dataset.train_labels, run.split.server)
    counts = np.eye(10)[np.arange(run.config.data.devices) % 10] * 20
    context: Any = replace(
        run._context(run._engine()), server=server, census=Census(counts.sum(axis=1), counts)
    )
    return RoundView(context, run.state, 0.1, [])


def test_losses_by_class_are_those_of_the_network(home: object) -> None:
    run = trusting()
    view = view_of(run)
    some = examined(view.context.server, run.config.run.seed)
    counts = np.bincount(some.targets.numpy(), minlength=10)
    assert counts.max() <= IMAGES
    assert set(np.flatnonzero(counts)) == set(view.context.server.targets.tolist())
    with deterministic():
        found = class_losses(run.state.weights, some, view)
    model = network(run.state.architecture, run.state.weights).eval().double()
    outputs = model(to_input(some.inputs).double()).detach()
    for label in range(10):
        own = some.targets == label
        if not own.any():
            assert np.isnan(found[label])
            continue
        expected = F.cross_entropy(outputs[own], some.targets[own]).item()
        assert found[label] == pytest.approx(expected, rel=1e-5)


def test_the_rise_is_weighted_by_what_the_device_has() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random(10), rng.random(10)
    before[7:] = after[7:] = np.nan
    counts = rng.integers(0, 30, 10).astype(float)
    expected = ((after - before)[:7] @ counts[:7]) / counts[:7].sum()
    assert rise(before, after, counts) == pytest.approx(expected)


def test_hostile_uploads_are_left_out_and_named(home: object) -> None:
    """Devices that hold one class each: an upload that predicts it counts, one that avoids it does not."""
    run = trusting()
    view = view_of(run)
    labels = sorted(set(view.context.server.targets.tolist()))
    bias = "fc3.bias" if "fc3.bias" in run.state.weights else list(run.state.weights)[-1]

    def upload(device: int, towards: float) -> Upload:
        moved = run.state.weights[bias].clone()
        moved[device % 10] += towards
        return Upload(device, 0, 10, 1, {**run.state.weights, bias: moved})

    view.context.census.labels[:] = np.eye(10)[[labels[0], labels[1], 9, 3, 4, 5]] * 20  # type: ignore[index]
    unknown = next(label for label in range(10) if label not in labels)
    view.context.census.labels[2] = np.eye(10)[unknown] * 20  # type: ignore[index]
    good = replace(upload(labels[0], 2.0), device=0)
    bad = replace(upload(labels[1], -2.0), device=1)
    unjudged = replace(upload(unknown, -2.0), device=2)
    with deterministic():
        rule = Trust({}, view)
        assert [one.device for one in rule.admit([good, bad, unjudged])] == [0, 2]
        assert rule.left_out["1"].startswith("the loss on the server's images of its classes rose by")
        alone = Trust({}, view)
        assert [one.device for one in alone.admit([bad])] == [1]  # a model must be made of something
        assert alone.left_out == {}


def test_it_asks_for_labels_and_finds_sign_flippers(home: object) -> None:
    attack = {"name": "sign-flip", "share": 0.34, "scale": 3.0}
    data = {"server_fraction": 0.25, "server_classes": 10, "augment": False}
    run = trusting(attack=attack, data=data, train={"rounds": 4, "cohort": 6, "epochs": 3, "batch": 10})
    assert run._algorithm.labels == "counts"
    run.run()
    hostile = {str(device) for device in hostile_devices(run.config)}
    named = [device for record in run.records[1:] for device in record.get("left_out", {})]
    assert len(named) >= 4
    assert set(named) <= hostile
    undefended = api.train(run.config.replace(aggregate={"name": "mean"}))
    assert digest(undefended.state.weights) != digest(run.state.weights)
    assert run.records[-1]["accuracy"] > undefended.records[-1]["accuracy"]
    assert torch.isfinite(run.state.steps["screening/norms/weights"]).all()


def test_it_needs_images_on_the_server(home: object) -> None:
    with pytest.raises(FeddumapError, match=r"aggregate\.name = 'trust' needs images on the server"):
        trusting(data={"server_fraction": 0.0})
