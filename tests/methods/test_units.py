"""Pruning hidden units in whole runs: a perceptron on a table, a small transformer on tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.messages import Broadcast, InputSpec, Question
from feddumap.core.tensors import digest
from feddumap.data import cache
from feddumap.data.dataset import Arrays, Contents, Dataset
from feddumap.device.holdings import SplitHoldings
from feddumap.device.surveys import answer
from feddumap.device.task import Task
from feddumap.engine.resolution import make_split
from feddumap.engine.session import Session
from feddumap.errors import FeddumapError
from feddumap.pruning import rates
from feddumap.system.callbacks import ignore
from tests.conftest import small

CLASSES, PRUNED = 4, 1
TABLE = InputSpec("numbers", (7,))
TOKENS = InputSpec("tokens", (6,), vocabulary=11)
TRANSFORMER = "tests.support.prunable_networks:Attention"


def written(folder: Path, given: InputSpec, seed: int = 0) -> Dataset:
    """Random samples, whose class shows in their numbers or tokens."""
    rng = np.random.default_rng(seed)

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % CLASSES
        if given.kind == "tokens":
            return (rng.integers(0, 7, (count, 6)) + labels[:, None]).astype(np.int64), labels
        return (rng.standard_normal((count, 7)) + labels[:, None]).astype(np.float32), labels

    names = tuple(f"class {label}" for label in range(CLASSES))
    cache.write(folder, "own", Contents(Arrays(*part(160), *part(20)), names, "a test", given))
    return cache.read(folder)


@pytest.fixture
def table(tmp_path: Path) -> Dataset:
    return written(tmp_path / "table", TABLE)


@pytest.fixture
def tokens(tmp_path: Path) -> Dataset:
    return written(tmp_path / "tokens", TOKENS)


def config(method: dict[str, Any], model: str = "mlp", **data: Any) -> Config:
    return small(
        method={"prune_round": PRUNED, **method},
        model={"name": model},
        data={"devices": 4, "shards_per_device": 1, "server_fraction": 0.2, **data},
        train={"rounds": 3, "cohort": 2, "batch": 16},
        clock={"train_seconds": 1.0},
    )


def started(wanted: Config, data: Dataset) -> Session:
    resolved = api.complete(wanted, data)
    run = Session(resolved, data, make_split(resolved, data, ignore))
    run.check()
    return run


def until_pruned(run: Session) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights before the pruning, and the record of its round."""
    rounds = iter(run)
    for _ in range(PRUNED):
        next(rounds)
    before = run.state.weights
    record = next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    return before, record


def fixed(name: str, rate: float = 0.5) -> dict[str, Any]:
    return {"name": name, "units": "all", "rate": "fixed", "fixed_rate": rate}


def test_fedap_on_a_perceptron_by_hand(table: Dataset) -> None:
    run = started(config(fixed("fedap")), table)
    weights, record = until_pruned(run)
    told = record["pruning"]
    scalars = torch.cat([tensor.flatten().abs() for tensor in weights.values()]).sort().values
    limit = float(scalars[len(scalars) // 2 - 1])
    assert told["threshold"] == limit
    server = torch.from_numpy(np.array(table.train_inputs[run.split.server]))
    hidden1 = F.relu(F.linear(server, weights["fc1.weight"], weights["fc1.bias"]))
    hidden2 = F.relu(F.linear(hidden1, weights["fc2.weight"], weights["fc2.bias"]))
    kept = {}
    for name, hidden, width in (("fc1", hidden1, 128), ("fc2", hidden2, 64)):
        share = float((weights[f"{name}.weight"].abs() < limit).double().mean())
        order = hidden.double().mean(0).argsort(stable=True)
        gone = sorted(order[: int(share * width)].tolist())
        kept[name] = width - len(gone)
        expected = {"rate": pytest.approx(share), "filters": width, "kept": kept[name], "removed": gone}
        assert told["layers"][name] == expected
        assert 0 < len(gone) < width
    assert told["layers"].keys() == {"fc1", "fc2"}
    products = 7 * kept["fc1"] + kept["fc1"] * kept["fc2"] + kept["fc2"] * CLASSES
    assert told["macs"] == {"before": 7 * 128 + 128 * 64 + 64 * CLASSES, "after": products}
    assert told["parameters"]["after"] == products + kept["fc1"] + kept["fc2"] + CLASSES
    assert run.state.architecture.widths == kept


def test_hrank_on_a_transformer_by_hand(tokens: Dataset) -> None:
    run = started(config({"name": "hrank", "units": "all", "prune_rate": 0.5}, TRANSFORMER), tokens)
    _, record = until_pruned(run)
    told = record["pruning"]
    assert {name: (layer["filters"], layer["kept"]) for name, layer in told["layers"].items()} == {
        "inner": (16, 8)
    }
    # eight units of both linear layers, at six positions
    assert told["macs"]["before"] - told["macs"]["after"] == 6 * 2 * 8 * 8
    assert told["parameters"]["before"] - told["parameters"]["after"] == 8 * 8 + 8 + 8 * 8
    assert told["refused"]["head"] == "its units are the network's outputs"
    assert told["refused"].keys() == {"query", "key", "value", "mix", "outer", "head"}
    assert run.state.weights["inner.weight"].shape == (8, 8)
    assert run.state.weights["outer.weight"].shape == (8, 8)
    assert run.state.architecture.channels == (("inner", 8),)


@pytest.mark.parametrize(
    ("given", "model", "method"),
    [
        (TABLE, "mlp", fixed("feddumap")),
        (TOKENS, TRANSFORMER, fixed("feddumap")),
        (TOKENS, TRANSFORMER, {"name": "hrank", "units": "all", "base": "feddum"}),
    ],
    ids=["feddumap-mlp", "feddumap-transformer", "hrank-transformer"],
)
def test_workers_do_not_change_a_bit(
    tmp_path: Path, given: InputSpec, model: str, method: dict[str, Any]
) -> None:
    data = written(tmp_path / "data", given)
    ends = []
    for workers in (1, 2):
        run = started(config(method, model).replace(run={"workers": workers}), data)
        bits = [(digest(run.state.weights), digest(run.state.steps)) for _ in run]
        ends.append((bits, run.state.architecture, [{**record, "wall": 0} for record in run.records]))
    assert ends[0] == ends[1]
    records = ends[0][2]
    assert records[-1]["macs"] < records[0]["macs"]
    assert records[-1]["parameters"] < records[0]["parameters"]
    assert records[-1]["bytes_down"] < records[0]["bytes_down"]


def test_rates_of_nodes_on_a_table(table: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "STEPS", 6)
    run = started(config({"name": "fedduap", "units": "all", "keep": ["fc2"]}), table)
    _, record = until_pruned(run)
    assert [node["device"] for node in record["pruning"]["nodes"]] == [-1, 0, 1, 2, 3]
    assert record["pruning"]["layers"].keys() == {"fc1"}
    assert record["pruning"]["layers"]["fc1"]["removed"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_device_ranks_units_for_a_server_without_data(table: Dataset, workers: int) -> None:
    wanted = config(fixed("fedap"), server_fraction=0.0).replace(run={"workers": workers})
    run = started(wanted, table)
    _, record = until_pruned(run)
    assert all(layer["removed"] for layer in record["pruning"]["layers"].values())
    left = record["pruning"]["parameters"]["after"]
    assert record["bytes_up"] == 2 * 4 * left + 8 * (128 + 64)


@pytest.mark.parametrize("name", ["fedap", "hrank"])
def test_a_network_without_filters_is_refused_with_the_remedy(
    name: str, table: Dataset, tokens: Dataset
) -> None:
    with pytest.raises(FeddumapError, match=r"\(it has none\).* method.units=all to cut .* of fc1, fc2$"):
        started(config({"name": name}), table)
    with pytest.raises(FeddumapError, match=r"\(it has none\).* method.units=all to cut .* of inner$"):
        started(config({"name": name}, TRANSFORMER), tokens)


def test_settings_are_checked_before_training(table: Dataset) -> None:
    with pytest.raises(FeddumapError, match=r"pattern 'head\.\*', which matches no layer: .*fc1, fc2, fc3"):
        started(config({**fixed("fedap"), "keep": ["head.*"]}), table)
    with pytest.raises(FeddumapError, match=r"no layer of this network .*fc1: method\.keep names fc1; fc2: "):
        started(config({**fixed("fedap"), "keep": ["fc*"]}), table)
    with pytest.raises(FeddumapError, match=r"method\.units = 'some'"):
        started(config({"name": "fedap", "units": "some"}), table)


def test_a_run_from_before_these_keys_is_the_same_run(home: Path, tmp_path: Path) -> None:
    wanted = small(method={"name": "fedap", "prune_round": 1})
    api.start(wanted, tmp_path / "run").close()
    file = tmp_path / "run" / "config.toml"
    lines = file.read_text().splitlines()
    older = [line for line in lines if not line.startswith(("units =", "keep ="))]
    assert len(older) == len(lines) - 2
    file.write_text("\n".join(older) + "\n")
    api.begin(wanted, tmp_path / "run").close()
    with pytest.raises(FeddumapError, match="belongs to another configuration"):
        api.begin(wanted.replace(method={"units": "all"}), tmp_path / "run")


def test_a_device_refuses_to_rank_unknown_layers(table: Dataset) -> None:
    run = started(config(fixed("fedap")), table)
    holdings = SplitHoldings(table, run.split, 1)
    message = Broadcast(0, run.state.architecture, run.state.weights, 0.1)
    task = Task(0, message, holdings, run.config)
    assert answer(Question("ranks", {"layers": ["fc2"]}), task).tensors["fc2"].shape == (64,)
    with pytest.raises(FeddumapError, match="unknown layer 'fc3'"):
        answer(Question("ranks", {"layers": ["fc3"]}), task)
