"""The cost of rounds over Flower: seconds relative to the simulation, and bytes sent relative to those
counted."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from feddumap import run as api
from feddumap.bench.workload import Times
from feddumap.config import Config
from feddumap.flower.local import project, up
from feddumap.system.callbacks import Progress, ignore


def bench_flower(model: str, nodes: int, rounds: int, progress: Progress = ignore) -> dict[str, Any]:
    """Time `rounds` rounds after a first one: FedAvg on the digits, one local epoch, over Flower by processes
    on this machine with TLS and node keys, and the same run in the simulation."""
    sets = [f"model.name={model}", "method.name=fedavg", f"train.rounds={rounds + 1}", "train.epochs=1"]
    with tempfile.TemporaryDirectory(prefix="feddumap-bench-") as temporary:
        made = project.create(Path(temporary) / "federation", nodes, sets=sets)

        def show(_: str, records: list[dict[str, Any]]) -> None:
            progress("rounds over Flower", len(records), rounds + 1)

        finished = up.up(made, nodes, say=lambda _: None, show=show)
        over = api.resume(made.run)
        over.close()
    simulated = _simulated(over.config, progress)
    same = all(
        torch.equal(tensor, simulated.state.weights[name]) for name, tensor in over.state.weights.items()
    )
    traffic = finished.traffic
    return {
        "model": model,
        "devices": nodes,
        "rounds": rounds,
        "parameters": simulated.records[0]["parameters"],
        "flower": _times(over.records).to_json(),
        "simulation": _times(simulated.records).to_json(),
        "same_weights": same,
        "bytes_down": {"counted": traffic.counted_down, "sent": traffic.sent},
        "bytes_up": {"counted": traffic.counted_up, "received": traffic.received},
    }


def _simulated(config: Config, progress: Progress) -> api.Run:
    def show(record: Mapping[str, Any]) -> None:
        progress("simulated rounds", record["round"] + 1, config.train.rounds)

    return api.train(config.replace(run={"engine": "local"}), on_round=show)


def _times(records: Sequence[Mapping[str, Any]]) -> Times:
    walls = [record["wall"] for record in records]
    return Times(walls[0], [after - before for before, after in pairwise(walls)])
