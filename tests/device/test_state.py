"""What devices keep between rounds, and SCAFFOLD, which lives by it."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.messages import Broadcast, Tensors
from feddumap.core.rng import stream
from feddumap.core.tensors import all_finite, digest
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.device.state import FileStore, InMemoryStore, StateStore
from feddumap.engine.local import Evaluator, LocalCohort
from feddumap.engine.rounds import broadcast_of
from feddumap.errors import FeddumapError
from feddumap.methods import compose
from feddumap.models import network
from feddumap.runs.reader import read_checkpoint
from feddumap.system import atomic_files
from feddumap.system.determinism import deterministic
from tests.conftest import small
from tests.support.oracles import averaged, taken, walk

FULL = 15_626  # LeNet's parameters


def config(**sections: dict[str, Any]) -> Config:
    data = {"partition": "dirichlet", "size_spread": 0.8}
    return small(method={"name": "scaffold"}, data=data, train={"rounds": 5, "cohort": 2}).replace(**sections)


def message_of(run: api.Run, controls: Tensors) -> Broadcast:
    return replace(broadcast_of(run.state, run.config), extra={f"c/{n}": c for n, c in controls.items()})


def cohort_of(run: api.Run, memory: StateStore) -> LocalCohort:
    executor = Executor(
        run.config, SplitHoldings(run.dataset, run.split, run.config.run.seed), compose(run.config)
    )
    return LocalCohort(executor, Evaluator(run.dataset, run.config), memory)


def remembered(folder: Path) -> dict[int, tuple[int, str]]:
    """By device: the round of its newest memory, and its bits."""
    newest = {}
    for path in sorted(folder.glob("*.safetensors")):
        device, number = map(int, path.stem.split("-"))
        newest[device] = (number, digest(load_file(path)))
    return newest


# SCAFFOLD


def test_a_device_of_scaffold_equals_option_two(home: object) -> None:
    """y ← y − η (g − c_k + c) for K steps, and c_k⁺ = c_k − c + (x − y)/(K η), in float64."""
    run = api.start(config(train={"epochs": 2, "batch": 16}))
    x = run.state.weights
    generator = torch.Generator().manual_seed(0)
    c, own = ({n: torch.randn(t.shape, generator=generator) / 50 for n, t in x.items()} for _ in range(2))
    store = InMemoryStore()
    store.keep(3, -1, {f"c/{name}": tensor for name, tensor in own.items()})
    with deterministic():
        (upload,) = cohort_of(run, store).train(message_of(run, c), [3])
    kept = store.recall(3, 1)
    data, rng = taken(run, run.split.device(3)), stream(777, "batches", 0, 3)
    y = walk(run, x, data, rng, 0, lambda n, g: g - own[n].double() + c[n].double())
    steps = 2 * -(-len(data) // 16)
    assert upload.steps == steps > 4
    assert set(kept) == set(upload.extra) == {f"c/{name}" for name in x}
    for name in x:
        new = own[name].double() - c[name].double() + (x[name].double() - y[name]) / (steps * 0.05)
        torch.testing.assert_close(upload.weights[name].double(), y[name], rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(kept[f"c/{name}"].double(), new, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(upload.extra[f"c/{name}"].double(), new - own[name], rtol=1e-3, atol=1e-5)
    assert upload.nbytes({}) == 2 * 4 * FULL  # what it keeps is not sent


def test_the_servers_control_is_the_mean_of_all_devices(home: object, tmp_path: Path) -> None:
    """c = Σ n_k c_k / n over all devices, chosen or not, of unequal sizes; and the wire is twice FedAvg's."""
    run = api.start(config(train={"rounds": 4}), tmp_path / "run")
    sizes = [int(size) for size in run.split.sizes]
    assert len(set(sizes)) > 3
    controls: list[Tensors] = [{name: torch.zeros_like(t) for name, t in run.state.weights.items()}] * 6
    for record in run:
        for device in record["devices"]:
            path = tmp_path / "run" / "devices" / f"{device:06d}-{record['round']:06d}.safetensors"
            controls[device] = {name.removeprefix("c/"): t for name, t in load_file(path).items()}
        for name, mean in averaged(sizes, controls).items():
            torch.testing.assert_close(run.state.steps[f"c/{name}"], mean, rtol=1e-4, atol=1e-7)
        assert record["bytes_down"] == record["bytes_up"] == 2 * 2 * 4 * FULL
    assert len({digest(control) for control in controls}) > 3
    run.close()


def test_one_step_of_everybody_is_gradient_descent(home: object) -> None:
    """With K = 1, y_k = x − η (∇f_k(x) − c_k + c). The mean of these, weighted by n_k, is x − η ∇f(x), as
    c = Σ n_k c_k / n, whatever the c_k are; and c_k⁺ = c_k − c + (x − y_k)/η = ∇f_k(x), so c⁺ = ∇f(x)."""
    run = api.start(config(train={"rounds": 2, "cohort": 6, "batch": 2000}, data={"augment": False}))
    everything = taken(run, run.split.indices)
    images = everything.inputs.permute(0, 3, 1, 2).double() / 255
    x = {name: tensor.double() for name, tensor in run.state.weights.items()}
    for number, _ in enumerate(run):
        model = network(run.state.architecture, x).double()
        loss = F.cross_entropy(model(images), everything.targets)
        gradient = dict(zip(x, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        x = {name: x[name] - 0.05 * 0.99**number * gradient[name] for name in x}
        for name, tensor in run.state.weights.items():
            torch.testing.assert_close(tensor.double(), x[name], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(
                run.state.steps[f"c/{name}"].double(), gradient[name], rtol=1e-3, atol=1e-5
            )


def test_the_first_round_is_fedavgs(home: object) -> None:
    methods: list[dict[str, Any]] = [{"name": "scaffold"}, {"name": "fedavg"}]
    run, plain = (api.start(config(method=method, train={"rounds": 2})) for method in methods)
    mine, theirs = ([digest(r.state.weights) for _ in r] for r in (run, plain))
    assert mine[0] == theirs[0]
    assert mine[1] != theirs[1]  # c is no longer zero


# memories


def piece(value: int) -> Tensors:
    return {"v": torch.tensor([value])}


@pytest.mark.parametrize("kind", [InMemoryStore, FileStore])
def test_the_newest_memory_from_before(kind: Any, tmp_path: Path) -> None:
    memory: StateStore = kind() if kind is InMemoryStore else kind(tmp_path / "devices")
    assert memory.recall(0, 9) == {}
    memory.keep(0, 2, piece(20))
    memory.keep(0, 5, piece(50))
    memory.keep(1, 4, piece(41))
    assert [memory.recall(0, before).get("v") for before in (6, 5, 3)] == [50, 20, 20]
    assert memory.recall(0, 2) == {}
    assert memory.recall(1, 9)["v"] == 41
    memory.keep(0, 5, piece(51))  # again
    assert [memory.recall(0, before)["v"] for before in (6, 5)] == [51, 20]
    memory.keep(0, 3, piece(30))  # an earlier round again: what came later is no longer so
    assert [memory.recall(0, before)["v"] for before in (9, 4, 3)] == [30, 30, 20]


State = dict[int, int]
"""What each device ought to remember."""


def live(memory: StateStore, state: State, number: int, devices: list[int], serial: Iterator[int]) -> State:
    """A round: each device finds what it ought to, and keeps something new."""
    for device in devices:
        assert memory.recall(device, number) == expected(state, device), (number, device)
        state = {**state, device: next(serial)}
        memory.keep(device, number, piece(state[device]))
    return state


def expected(state: State, device: int) -> Tensors:
    return piece(state[device]) if device in state else {}


chosen = st.lists(st.sets(st.integers(0, 3), max_size=3).map(sorted), min_size=12, max_size=12)
lives = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=6)


@settings(max_examples=60)
@given(chosen, lives, st.integers(1, 3))
def test_whatever_a_kept_checkpoint_needs_stays(
    chosen: list[list[int]], lives: list[tuple[int, int, bool]], every: int
) -> None:
    """Lives of some rounds, each ended by a kill in mid-round, the next from the newest checkpoint or, where
    that is lost, the one before. A round has the same devices in every life; what they keep is another."""
    serial = count()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_files, "sync", lambda _: None)
        folder = Path(name) / "devices"
        saved: dict[int, tuple[State, dict[str, int]]] = {0: ({}, {})}
        for rounds, more, lost in lives:
            if lost and len(saved) > 1:
                del saved[max(saved)]
            start, drawer = max(saved), FileStore(folder)
            end = min(start + rounds, len(chosen) - 1)
            state, needed = saved[start]
            drawer.verify(needed)
            for number in range(start, end):
                state = live(drawer, state, number, chosen[number], serial)
                if (number + 1) % every == 0:
                    needed = drawer.newest(number + 1)
                    assert set(map(int, needed)) == set(state)
                    saved[number + 1] = (state, needed)
                    saved = {n: saved[n] for n in sorted(saved)[-2:]}
                    drawer.tidy(min(saved))
            live(drawer, state, end, chosen[end][:more], serial)
        drawer, last = FileStore(folder), max(saved)
        drawer.tidy(last)
        for device in range(4):
            assert drawer.recall(device, last) == expected(saved[last][0], device)
        left = [path.stem.split("-") for path in folder.glob("*")] if folder.exists() else []
        assert sum(int(number) < last for _, number in left) == len(saved[last][0])  # and no more


@settings(max_examples=60)
@given(chosen, st.lists(st.integers(0, 3), max_size=12))
def test_a_store_accepts_a_repeated_round(chosen: list[list[int]], broken: list[int]) -> None:
    store, serial = InMemoryStore(), count()
    state: State = {}
    for number, (devices, part) in enumerate(zip(chosen, broken, strict=False)):
        live(store, state, number, devices[:part], serial)  # left in the middle
        state = live(store, state, number, devices, serial)


# runs


def outcome(run: api.Run, directory: Path) -> tuple[str, list[dict[str, Any]], dict[int, tuple[int, str]]]:
    records = [{**record, "wall": 0} for record in run.records]
    return digest({**run.state.weights, **run.state.steps}), records, remembered(directory / "devices")


@pytest.fixture(scope="module")
def whole(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An undisturbed run, and its directory as it was in the midst of round 4, with checkpoints of
    every round and (under `sparse`) of every third."""
    place = tmp_path_factory.mktemp("scaffold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        for name, every in (("killed", 1), ("sparse", 3)):
            run = api.start(config(run={"checkpoint_every": every}), place / "whole" / name)

            def copy(_: str, done: int, __: int, run: api.Run = run, name: str = name) -> None:
                if (len(run.records), done) == (4, 1):
                    shutil.copytree(place / "whole" / name, place / name)

            assert len(list(run.iterate(copy))) == run.rounds
            run.close()
    return outcome(run, place / "whole" / "sparse"), place


@pytest.fixture
def killed(home: object, whole: tuple[Any, Path], tmp_path: Path) -> Path:
    """The directory of a run killed in round 4, with the checkpoints of 3 and 4 rounds."""
    return shutil.copytree(whole[1] / "killed", tmp_path / "run")


@pytest.mark.parametrize(("name", "start", "ahead"), [("killed", 4, 1), ("sparse", 3, 3)])
def test_a_kill_in_mid_round(
    home: object, whole: tuple[Any, Path], tmp_path: Path, name: str, start: int, ahead: int
) -> None:
    directory = shutil.copytree(whole[1] / name, tmp_path / "run")
    numbers = [number for number, _ in remembered(directory / "devices").values()]
    assert sum(number >= start for number in numbers) == ahead  # memories of rounds that will be done again
    run = api.resume(directory, workers=1)
    assert run.state.round == start
    run.run().close()
    assert outcome(run, directory) == whole[0]


def lose(directory: Path, oldest: bool) -> None:
    """Remove a memory that only the newest checkpoint needs, or one that both do."""
    made = read_checkpoint(max(directory.glob("checkpoint-*.json"))).devices
    newest = max(made.values())
    device, number = next((d, n) for d, n in made.items() if (n < newest if oldest else n == newest))
    (directory / "devices" / f"{int(device):06d}-{number:06d}.safetensors").unlink()


@pytest.mark.parametrize(("oldest", "start"), [(False, 3), (True, 0)])
def test_a_missing_memory_damages_the_checkpoint(
    whole: tuple[Any, Path], killed: Path, oldest: bool, start: int
) -> None:
    said: list[str] = []
    lose(killed, oldest)
    run = api.resume(killed, workers=1, say=said.append)
    assert run.state.round == start
    told = f"resuming from round {3 if start else 0}"
    assert "checkpoint-000004.json cannot be used: cannot read " in said[-1]
    assert said[-1].endswith(told)
    run.run().close()
    assert outcome(run, killed) == whole[0]


def test_a_run_begun_again_can_be_left_again(whole: tuple[Any, Path], killed: Path) -> None:
    """The checkpoints that could not be used must neither outlive the new ones nor come back."""
    lose(killed, oldest=True)
    run = api.resume(killed, workers=1)
    rounds = run.iterate()
    next(rounds), next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    run.close()
    again = api.resume(killed, workers=1)
    assert again.state.round == 2
    again.run().close()
    assert outcome(again, killed) == whole[0]


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: data[:-1] + b"\x55"])
def test_a_damaged_memory_is_named(killed: Path, tmp_path: Path, damage: Any) -> None:
    """At once where a checkpoint rests on it; and when a device asks for it."""
    for path in killed.glob("devices/*.safetensors"):
        path.write_bytes(damage(path.read_bytes()))
    said: list[str] = []
    api.resume(killed, workers=1, say=said.append).close()
    assert re.search(r"cannot read .*/devices/00000\d-00000\d\.safetensors, the memory of device", said[-1])
    drawer = FileStore(tmp_path / "other")
    drawer.keep(1, 0, {"c/w": torch.ones(3)})
    (path,) = (tmp_path / "other").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FeddumapError, match=r"cannot read .*000001-000000.*start the run anew under another"):
        drawer.recall(1, 1)
    (tmp_path / "other" / "000002-000000 (copy).safetensors").write_bytes(b"")
    assert FileStore(tmp_path / "other").recall(2, 1) == {}  # not one of ours


@pytest.mark.parametrize("odd", [{"c/conv1.bias": torch.zeros(7)}, {"c/conv9.bias": torch.zeros(6)}])
def test_a_memory_of_another_form_is_refused(home: object, odd: Tensors) -> None:
    run, store = api.start(config()), InMemoryStore()
    message = message_of(run, run.state.weights)
    good = {f"c/{name}": torch.zeros_like(tensor) for name, tensor in run.state.weights.items()}
    store.keep(1, -1, good)
    store.keep(2, -1, {**good, **odd})
    list(cohort_of(run, store).train(message, [1]))
    with pytest.raises(FeddumapError, match="the memory of device 2 does not fit the model of round 0"):
        list(cohort_of(run, store).train(message, [2]))


def test_what_is_not_finite_is_not_kept(home: object) -> None:
    """A device that diverges goes on with the memory it had."""
    run, store = api.start(config()), InMemoryStore()
    message = message_of(run, {name: torch.zeros_like(tensor) for name, tensor in run.state.weights.items()})
    kept = []
    for number, lr in enumerate((0.05, 1e30, 0.05)):
        (upload,) = cohort_of(run, store).train(replace(message, round=number, lr=lr), [5])
        assert all_finite(upload.weights) == (lr < 1)
        kept.append(digest(store.recall(5, number + 1)))
        assert all_finite(store.recall(5, number + 1))
    assert kept[0] == kept[1] != kept[2]
