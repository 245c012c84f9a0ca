"""Frozen and unused parameters: the others train, with every method, and what is frozen is sent once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from feddumap import export
from feddumap import run as api
from feddumap.config import Config
from feddumap.core.messages import Question
from feddumap.core.tensors import all_finite
from feddumap.errors import FeddumapError
from feddumap.export.formats import load
from feddumap.models import frozen, initialise, parameters
from feddumap.models.cost import parameter_names
from feddumap.models.frozen import constants_of
from feddumap.pruning.curvature.lanczos import hessian
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.rates import node_rate
from feddumap.training.backends import make_model
from feddumap.training.samples import to_input
from tests.support import methods
from tests.support.methods import NAMES, every, outcome, resumed
from tests.support.oracles import taken
from tests.support.own_networks import FROZEN, name_of

pytestmark = pytest.mark.usefixtures("short_distillation")

MODEL = {"name": name_of("PartlyFrozen")}
TRAINED = 6 + (5 * 6 * 9 + 5) + (5 * 10 + 10) + (3 * 2 + 2)
BUFFERS = 4 * 6 * 2 + 8  # batch norm's
CONSTANTS = 4 * (6 * 9 + 6 + 6)


def config_of(method: str = "fedavg", **sections: dict[str, Any]) -> Config:
    return methods.config_of(method, model=MODEL, train={"rounds": 2}).replace(**sections)


@every
def test_every_method_trains_what_is_not_frozen(home: object, name: str) -> None:
    run = api.start(config_of(name))
    before = run.model()
    run.run()
    assert all_finite({**run.state.weights, **run.state.steps})
    assert FROZEN.isdisjoint(run.state.weights)
    after = run.model()
    assert not torch.equal(after.head.weight, before.head.weight)
    rows = {row.numpy().tobytes() for row in before.backbone.weight.detach()}
    assert {row.numpy().tobytes() for row in after.backbone.weight.detach()} <= rows  # a cut removes some
    if after.backbone.out_channels == 6:
        for key in FROZEN:
            assert torch.equal(after.get_parameter(key), before.get_parameter(key))
    if name not in ("fedkt", "fedkt-iter", "imc", "prunefl"):  # which begin anew, decay or mask weights
        assert torch.equal(after.unused.weight, before.unused.weight)


QUICK = {"scaffold", "feddumap", "prunefl"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_two_workers_and_a_resume_change_no_bit(home: object, name: str, tmp_path: Path) -> None:
    expected = api.train(config_of(name))
    _, again = resumed(config_of(name, run={"workers": 2}), tmp_path / "run", 1)
    assert outcome(again) == outcome(expected)


def test_frozen_tensors_are_sent_once(home: object) -> None:
    """To each of 20 devices before round 0, and their time is on the clock."""
    run = api.train(config_of())
    assert parameters(run.state.architecture) == TRAINED
    assert set(parameter_names(run.state.architecture)).isdisjoint(FROZEN)
    message = 4 * TRAINED + BUFFERS
    assert [r["bytes_down"] for r in run.records] == [2 * message + 20 * CONSTANTS, 2 * message]
    assert [r["bytes_up"] for r in run.records] == [2 * message] * 2
    slower = api.train(config_of(clock={"profile": "paper", "train_seconds": 1.0}))
    first, second = slower.records[0]["clock"], slower.records[1]["clock"]
    transfer = slower._clock.transfer(range(20), CONSTANTS)
    assert transfer > 0
    assert first == pytest.approx(second - first + transfer)


def test_a_cut_leaves_frozen_tensors_alone(home: object) -> None:
    run = api.train(methods.config_of("hrank", model=MODEL, train={"rounds": 3}))
    assert run.state.architecture.widths["middle"] < 5
    assert run.state.architecture.frozen == api.start(run.config).state.architecture.frozen
    assert "frozen" in prunable(run.state.architecture).refused["backbone"]
    sent = sum(tensor.nbytes for tensor in run.state.weights.values())
    assert [record["bytes_down"] for record in run.records[1:]] == [2 * sent] * 2


def test_two_runs_in_a_process_keep_their_own(home: object) -> None:
    one, other = (api.start(config_of(run={"seed": seed})) for seed in (1, 2))
    assert len(list(zip(one, other, strict=True))) == one.rounds  # round by round, in turns
    for run, seed in ((one, 1), (other, 2)):
        alone = api.start(config_of(run={"seed": seed}))
        assert torch.equal(run.model().backbone.weight, alone.model().backbone.weight)
        assert outcome(run) == outcome(alone.run())


def test_a_run_directory_and_an_export_hold_them(
    home: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = api.train(config_of(), tmp_path / "run")
    (file,) = (tmp_path / "run").glob("frozen-*.safetensors")
    assert load_file(file).keys() == FROZEN
    with monkeypatch.context() as other_process:
        other_process.setattr(frozen, "_KNOWN", {})
        export.write(tmp_path / "run", "safetensors")
        module, _ = load(tmp_path / "run" / "model.safetensors")
        x = run.state.architecture.input.random(4, torch.Generator().manual_seed(0))
    assert torch.equal(module(x), run.model()(x))
    monkeypatch.setattr(frozen, "_KNOWN", {})
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(FeddumapError, match=r"the checksum of frozen-.* does not match"):
        export.write(tmp_path / "run", "safetensors", force=True)


def test_a_file_of_first_weights_has_them_too(home: object, tmp_path: Path) -> None:
    start = api.start(config_of())
    whole = {**start.state.weights, **constants_of(start.state.architecture)}
    moved = {name: (t + 0.5 if t.is_floating_point() else t).contiguous() for name, t in whole.items()}
    save_file(moved, tmp_path / "w.safetensors")
    given = config_of(model={**MODEL, "weights": str(tmp_path / "w.safetensors")})
    expected = api.train(given)
    assert torch.equal(expected.model().backbone.weight, moved["backbone.weight"])
    _, again = resumed(given, tmp_path / "run", 1)
    assert outcome(again) == outcome(expected)


@pytest.mark.parametrize("mode", ["density", "gap"])
def test_curvature_is_that_of_the_trained_parameters(home: object, one_thread: None, mode: str) -> None:
    run = api.start(config_of("fedap"))
    question = Question("rate", {"mode": mode, "max_rate": None})
    data, shape = taken(run, run.split.device(0)[:20]), run.state.architecture
    model = make_model(shape, run.state.weights, "torch")
    rate = node_rate(model, shape, data, question, 1, ("a",))
    assert rate.d == (TRAINED if mode == "density" else rate.d)
    assert 0 < rate.d <= TRAINED
    assert np.isfinite([rate.p, rate.lambda_min, rate.lambda_max]).all()


def test_hessian_products_of_a_partly_frozen_network(home: object, one_thread: None) -> None:
    run = api.start(config_of())
    data, model = taken(run, run.split.device(0)[:20]), run.model().double()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(named) == 7

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = torch.func.functional_call(model, values, (to_input(data.inputs).double(),))
        return torch.nn.functional.cross_entropy(outputs, data.targets)

    vector = torch.randn(TRAINED, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    parts = torch.split(vector, [p.numel() for p in named.values()])
    tangents = {n: part.view_as(p) for (n, p), part in zip(named.items(), parts, strict=True)}
    detached = {name: p.detach() for name, p in named.items()}
    _, expected = torch.func.jvp(torch.func.grad(loss), (detached,), (tangents,))
    found = hessian(make_model(run.state.architecture, run.state.weights, "torch"), data)(vector.float())
    flat = torch.cat([expected[name].reshape(-1) for name in named])
    torch.testing.assert_close(found.double(), flat, rtol=1e-3, atol=1e-5)


def test_initial_weights_without_constants(home: object) -> None:
    shape = api.start(config_of()).state.architecture
    assert FROZEN.isdisjoint(initialise(shape, 5))
