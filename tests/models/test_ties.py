"""A tensor with two names is one tensor: trained, stepped, masked, sent, stored and exported once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddumap import export
from feddumap import run as api
from feddumap.config import Config
from feddumap.core.rng import stream
from feddumap.export.formats import load
from feddumap.models import parameters, state_of
from feddumap.training.samples import batches
from tests.support.methods import outcome, resumed, tiny
from tests.support.oracles import taken
from tests.support.own_networks import TIED, TiedLinear, name_of

tied = pytest.mark.parametrize("kind", TIED)

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "server-momentum": {},
    "fedadam": {},
    "scaffold": {},
    "feddum": {},
    "imc": {"prune_round": 1, "rate": "fixed", "fixed_rate": 0.5},
    "prunefl": {"adjust_every": 1, "first_passes": 20},
}


def config_of(kind: str, method: str, **run: Any) -> Config:
    keys = {"name": method, **METHODS[method]}
    return tiny(model={"name": name_of(kind)}, method=keys, train={"rounds": 2}, run=run)


@tied
@pytest.mark.parametrize("method", METHODS)
def test_a_tied_network_is_the_function_that_it_computes(home: object, kind: str, method: str) -> None:
    """All results equal, to the bit, those of a network that has each tensor under one name."""
    twin, first, second = TIED[kind]
    run, other = api.train(config_of(kind, method)), api.train(config_of(twin, method))
    assert first in run.state.weights
    assert second not in run.state.weights
    bits, records = outcome(run)
    expected = outcome(other)
    same = [{key: value for key, value in record.items() if key != "macs"} for record in records]
    assert same == [{key: value for key, value in r.items() if key != "macs"} for r in expected[1]]
    assert bits == expected[0]
    module = run.model()
    assert module.get_parameter(first) is module.get_parameter(second)
    assert torch.equal(module.get_parameter(second), run.state.weights[first])


@tied
def test_bytes_count_a_tensor_once(home: object, kind: str) -> None:
    run = api.train(config_of(kind, "fedavg"))
    module = api.start(run.config).model()
    sent = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    assert run.records[0]["bytes_down"] == run.records[0]["bytes_up"] == 2 * sent
    assert parameters(run.state.architecture) == sum(p.numel() for p in module.parameters())


def oracle(run: api.Run, rounds: int, step: Any) -> nn.Module:
    """The module itself, trained by anyone's SGD in float64 on each device, averaged, and stepped."""
    config = run.config
    server = TiedLinear(10).double()
    server.load_state_dict({**run.state.weights, "out.weight": run.state.weights["embed.weight"]})
    for number in range(rounds):
        devices = run._algorithm.choose(config, number)
        lr = config.train.lr * config.train.lr_decay**number
        total = [torch.zeros_like(p) for p in server.parameters()]
        count = 0
        for device in devices:
            data = taken(run, run.split.device(device))
            local = TiedLinear(10).double()
            local.load_state_dict(server.state_dict())
            rng = stream(config.run.seed, "batches", number, device)
            augment = run.state.architecture.input
            for x, y in batches(data, config.train.epochs, config.train.batch, rng, augment=augment):
                F.cross_entropy(local(x.double()), y).backward()
                with torch.no_grad():
                    for p in local.parameters():
                        p -= lr * p.grad
                        p.grad = None
            for part, p in zip(total, local.parameters(), strict=True):
                part += len(data) * p.detach()
            count += len(data)
        with torch.no_grad():
            for i, p in enumerate(server.parameters()):
                p.copy_(step(i, p.clone(), total[i] / count))
    return server


def momentum() -> Any:
    kept: dict[int, torch.Tensor] = {}

    def step(i: int, before: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        g = before - mean
        kept[i] = 0.5 * kept[i] + 0.5 * g if i in kept else g
        return before - kept[i]

    return step


def adam() -> Any:
    ms: dict[int, torch.Tensor] = {}
    vs: dict[int, torch.Tensor] = {}

    def step(i: int, before: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        change = mean - before
        ms[i] = 0.9 * ms.get(i, torch.zeros_like(before)) + 0.1 * change
        vs[i] = 0.99 * vs.get(i, torch.full_like(before, 1e-6)) + 0.01 * change**2
        return before + 0.01 * ms[i] / (vs[i].sqrt() + 1e-3)

    return step


@pytest.mark.parametrize(("method", "step"), [("server-momentum", momentum), ("fedadam", adam)])
def test_the_module_itself_gives_the_same_weights(home: object, method: str, step: Any) -> None:
    run = api.start(config_of("TiedLinear", method))
    expected = oracle(run, 2, step())
    run.run()
    for name, tensor in state_of(expected).items():
        torch.testing.assert_close(run.state.weights[name].double(), tensor, rtol=1e-4, atol=1e-6)


@tied
def test_a_checkpoint_an_export_and_two_workers_keep_the_tie(home: object, kind: str, tmp_path: Path) -> None:
    _, first, second = TIED[kind]
    expected = api.train(config_of(kind, "server-momentum"))
    _, again = resumed(config_of(kind, "server-momentum", workers=2), tmp_path / "run", 1)
    assert outcome(again) == outcome(expected)
    export.write(tmp_path / "run", "safetensors")
    module, _ = load(tmp_path / "run" / "model.safetensors")
    assert module.get_parameter(first) is module.get_parameter(second)
    x = again.state.architecture.input.random(4, torch.Generator().manual_seed(0))
    assert torch.equal(module(x), expected.model()(x))
