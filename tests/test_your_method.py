"""The files that docs/your-method.md shows, exactly as they are there, in a folder outside of the package."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from feddumap import run as api
from feddumap.config import Config, load
from feddumap.core.messages import Tensors
from feddumap.core.rng import stream
from feddumap.core.sampling import select
from feddumap.errors import FeddumapError
from feddumap.flower import server
from feddumap.flower.client import client_app
from feddumap.flower.local.federation import Federation
from feddumap.flower.local.project import Project
from feddumap.methods import compose
from feddumap.models import network
from feddumap.models.cost import parameter_names
from feddumap.runs.summary import finished
from feddumap.training.samples import batches
from tests.conftest import small
from tests.support.flower import alike
from tests.support.flower_grid import FakeGrid
from tests.support.methods import outcome, resumed
from tests.support.oracles import augmentation, taken
from tests.support.runs import wait_for_records

PAGE = (Path(__file__).parents[1] / "docs" / "your-method.md").read_text()
BLOCKS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^feddumap train (.*)$", PAGE, re.MULTILINE)
METHODS: dict[str, dict[str, Any]] = {
    "my_fednova:fednova": {"beta": 0.0},
    "my_feddyn:feddyn": {"alpha": 0.05},
}
both = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("user")
    for name, code in BLOCKS:
        (made / name).write_text(code)
    yield made
    for name, _ in BLOCKS:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture
def user(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the user's folder, which is not on the module search path."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return folder


def config_of(method: str, **sections: dict[str, Any]) -> Config:
    return small(
        data={"devices": 4, "partition": "dirichlet", "size_spread": 1.0},
        method={"name": method, **METHODS[method]},
        train={"rounds": 3, "cohort": 3, "batch": 64},
    ).replace(**sections)


def test_the_page_has_these_files() -> None:
    assert [name for name, _ in BLOCKS] == [
        "my_first.py",
        "my_fednova.py",
        "my_feddyn.py",
        "my_script.py",
        "test_my_methods.py",
    ]
    assert len(COMMANDS) == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands(user: Path, command: str) -> None:
    words = shlex.split(command)
    assert words[::2] == ["--set"] * (len(words) // 2)
    config = load(None, words[1::2])
    compose(config)
    api.start(config.replace(data={"devices": 10}, run={"workers": 1})).close()


Direction = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]


def descend(
    run: api.Run, start: Tensors, device: int, number: int, direction: Direction
) -> tuple[int, Tensors]:
    """Local training in float64, each parameter moved by −η direction(name, gradient, value)."""
    config, data = run.config, taken(run, run.split.device(device))
    model = network(run.state.architecture, start).double()
    named = dict(model.named_parameters())
    lr = config.train.lr * config.train.lr_decay**number
    rng = stream(config.run.seed, "batches", number, device)
    steps = 0
    for inputs, labels in batches(data, 1, config.train.batch, rng, augment=augmentation(run)):
        grads = torch.autograd.grad(F.cross_entropy(model(inputs.double()), labels), list(named.values()))
        for (name, value), grad in zip(named.items(), grads, strict=True):
            value.data -= lr * direction(name, grad, value.detach())
        steps += 1
    return steps, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def fednova_oracle(run: api.Run, weights: Tensors, rounds: int) -> Tensors:
    for number in range(rounds):
        chosen = select(run.config, number)
        found = [descend(run, weights, k, number, lambda _, g, w: g) for k in chosen]
        sizes = [len(run.split.device(k)) for k in chosen]
        assert len({steps for steps, _ in found}) > 1  # otherwise it were FedAvg
        p = [size / sum(sizes) for size in sizes]
        tau = sum(share * steps for share, (steps, _) in zip(p, found, strict=True))
        weights = {
            name: value
            - tau * sum(share * (value - w[name]) / steps for share, (steps, w) in zip(p, found, strict=True))
            for name, value in weights.items()
        }
    return weights


def feddyn_oracle(run: api.Run, weights: Tensors, rounds: int) -> Tensors:
    alpha, everyone = METHODS["my_feddyn:feddyn"]["alpha"], run.config.data.devices
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    own, h, again = dict.fromkeys(range(everyone), zeros), zeros, False
    for number in range(rounds):
        found = {}
        chosen = select(run.config, number)
        for k in chosen:
            again |= own[k] is not zeros
            h_k, first = own[k], weights

            def direction(
                name: str, g: torch.Tensor, w: torch.Tensor, h_k: Tensors = h_k, first: Tensors = first
            ) -> torch.Tensor:
                return g - h_k[name] + alpha * (w - first[name])

            _, found[k] = descend(run, weights, k, number, direction)
        for k in chosen:
            own[k] = {n: own[k][n] - alpha * (found[k][n] - weights[n]) for n in weights}
        moves = {n: sum(found[k][n] - weights[n] for k in chosen) for n in weights}
        h = {n: h[n] - alpha / everyone * moves[n] for n in weights}
        weights = {n: sum(found[k][n] for k in chosen) / len(chosen) - h[n] / alpha for n in weights}
    assert again  # a device's memory was used
    return weights


@both
def test_the_formulas_in_float64(user: Path, method: str) -> None:
    run = api.start(config_of(method, train={"rounds": 2}))
    assert set(parameter_names(run.state.architecture)) == set(run.state.weights)
    start = {name: tensor.double() for name, tensor in run.state.weights.items()}
    expected = {"my_fednova:fednova": fednova_oracle, "my_feddyn:feddyn": feddyn_oracle}[method](
        run, start, 2
    )
    run.run()
    moved = max(float((expected[n] - start[n]).abs().max()) for n in start)
    for name, value in run.state.weights.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=1e-3 * moved)


def test_fednova_with_momentum_counts_what_a_gradient_moves(user: Path) -> None:
    """a_k: with the gradient 1 in every step, w − w_k is η a_k."""
    run = api.start(config_of("my_fednova:fednova", train={"rounds": 1}).replace(method={"beta": 0.6}))
    record = next(iter(run))
    batch, sizes = run.config.train.batch, [len(run.split.device(k)) for k in record["devices"]]

    def moved(steps: int) -> float:
        m = w = 0.0
        for _ in range(steps):
            m = 0.6 * m + 0.4
            w += m
        return w

    effective = [size * moved(-(-size // batch)) for size in sizes]
    assert record["tau_eff"] == pytest.approx(sum(effective) / sum(sizes))


@both
def test_two_workers(user: Path, method: str) -> None:
    one = outcome(api.train(config_of(method)))
    assert outcome(api.train(config_of(method, run={"workers": 2}))) == one


@pytest.mark.slow
@both
def test_left_and_resumed(user: Path, tmp_path: Path, method: str) -> None:
    _, again = resumed(config_of(method), tmp_path / "run", 2)
    assert outcome(again) == outcome(api.train(config_of(method)))


def test_killed_in_one_process_and_resumed_in_another(user: Path, tmp_path: Path) -> None:
    """FedDyn, which has a state on the server and on devices, on two workers, from the command line."""
    config = config_of("my_feddyn:feddyn", train={"rounds": 6, "epochs": 10})
    (tmp_path / "config.toml").write_text(
        "\n".join(
            f"{section}.{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
            for section, keys in config.to_toml().items()
            for key, value in keys.items()
        )
    )
    directory = tmp_path / "run"
    command = [sys.executable, "-P", "-m", "feddumap"]
    train = [
        *command,
        "train",
        str(tmp_path / "config.toml"),
        "--set",
        "run.workers=2",
        "--out",
        str(directory),
    ]
    process = subprocess.Popen(train, stderr=subprocess.PIPE, text=True)
    wait_for_records(directory, 2)
    os.kill(process.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, errors
    assert not finished(directory)
    again = api.resume(directory, workers=1)
    assert 1 <= again.state.round < 6
    again.run().close()
    assert outcome(again) == outcome(api.train(config))


@both
def test_over_flowers_messages(user: Path, tmp_path: Path, method: str) -> None:
    allowed: dict[str, Any] = {"state": str(tmp_path), "allow-modules": True}
    grid = FakeGrid.of(4, **allowed)
    run = api.start(config_of(method, run={"engine": "flower", "timeout": 0.4}))
    run.engine = partial(server.cohort, grid)
    alike(run.run(), api.train(config_of(method)))


def test_a_node_must_allow_it(user: Path, tmp_path: Path) -> None:
    """Unless it is of Flower's simulation, or was started by `feddumap flower up`: those are the user's."""
    config = config_of("my_fednova:fednova", train={"rounds": 1}, run={"engine": "flower", "timeout": 0.4})
    run = api.start(config)
    run.engine = partial(server.cohort, FakeGrid.of(4, state=str(tmp_path)))
    with pytest.raises(FeddumapError, match="names code to run on this device, which its owner has not all"):
        run.run()
    run = api.start(config)
    nodes = FakeGrid.of(4, state=str(tmp_path)).nodes
    run.engine = partial(server.cohort, FakeGrid(nodes, client_app(modules=True)))
    assert len(run.run().records) == 1


@pytest.mark.parametrize(("method", "allowed"), [("my_fednova:fednova", True), ("fedavg", False)])
def test_devices_of_flower_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, allowed: bool
) -> None:
    (tmp_path / "config.toml").write_text(f'method.name = "{method}"')
    processes: Any = None
    federation = Federation(Project(tmp_path), processes)
    monkeypatch.setattr(federation, "start", lambda name, command: None)
    federation.start_nodes([0])
    written = tomllib.loads((federation.home / "node-0.toml").read_text())
    assert written["allow-modules"] is allowed


def test_its_script_and_its_tests(
    user: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(user)  # as for a script in that folder
    files = dict(BLOCKS)
    exec(compile(files["my_script.py"], "my_script.py", "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out.split()[-1]) > 0  # tau_eff of the last round
    names: dict[str, Any] = {}
    exec(compile(files["test_my_methods.py"], "test_my_methods.py", "exec"), names)
    tests = [name for name in names if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        names[name]()
