"""A worker process: jobs and replies are JSON lines over pipes, with their tensors in shared memory.

It exits when its parent exits, even if that is killed, because its pipe then closes.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from feddumap.config import Config
from feddumap.core.messages import Answer, Architecture, Broadcast, Question, Tensors, Upload
from feddumap.core.tensors import all_finite
from feddumap.data import cache
from feddumap.data.partition import Split
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.engine.local import Evaluator
from feddumap.engine.shared_memory import Region, clone_groups
from feddumap.errors import FeddumapError
from feddumap.methods import compose
from feddumap.models.frozen import constants_of, is_known, with_constants
from feddumap.system.determinism import deterministic


class Worker:
    """Runs jobs. A job names a region of `up`, which passes the states of its devices and receives its
    results; the other regions are only read."""

    def __init__(self, setup: dict[str, Any], down: Region, fixed: Region, up: Sequence[Region]) -> None:
        sys.path[:] = setup["path"]
        config = Config.parse(setup["config"])
        data = cache.read(Path(setup["dataset"]), verify=False)
        arrays = {name: tensor.numpy() for name, tensor in fixed.read(setup["split"])["split"].items()}
        split = Split.from_arrays(arrays, len(data.train_labels))
        self._executor = Executor(config, SplitHoldings(data, split, config.run.seed), compose(config))
        self._evaluator = Evaluator.of(data, split, config)
        self._down, self._up = down, up

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        broadcast = unpack_broadcast(job["broadcast"], self._down)
        up = self._up[job["region"]]
        match job["verb"]:
            case "train":
                states = clone_groups(up.read(job["memory"]))
                trained = [self._executor.train(broadcast, k, states.get(str(k), {})) for k in job["devices"]]
                return pack_uploads(trained, up)
            case "survey":
                question = Question(**job["question"])
                answers = [self._executor.answer(question, broadcast, device) for device in job["devices"]]
                return pack_answers(answers, up)
            case "evaluate":
                model = self._evaluator.model(broadcast.architecture, broadcast.weights)
                scores = [self._evaluator.chunk(model, start, stop) for start, stop in job["spans"]]
                return {"scores": [score.to_json() for score in scores]}
            case verb:
                raise ValueError(f"unknown job: {verb}")


def pack_broadcast(broadcast: Broadcast, region: Region) -> dict[str, Any]:
    groups = {"weights": broadcast.weights, "extra": broadcast.extra, "mask": broadcast.mask}
    groups["frozen"] = constants_of(broadcast.architecture)
    return {
        "round": broadcast.round,
        "lr": broadcast.lr,
        "architecture": broadcast.architecture.to_json(),
        "layout": region.write(groups),
    }


def unpack_broadcast(value: dict[str, Any], region: Region) -> Broadcast:
    groups = region.read(value["layout"])
    architecture = Architecture.from_json(value["architecture"])
    if not is_known(architecture):
        with_constants(architecture, groups["frozen"])
    return Broadcast(
        value["round"],
        architecture,
        groups.get("weights", {}),
        value["lr"],
        extra=groups.get("extra", {}),
        mask=groups.get("mask", {}),
    )


def pack_uploads(results: list[tuple[Upload, Tensors]], region: Region) -> dict[str, Any]:
    groups: dict[str, Tensors] = {}
    for i, (upload, state) in enumerate(results):
        groups |= {f"{i}/weights": upload.weights, f"{i}/extra": upload.extra, f"{i}/memory": state}
    uploads = [
        {
            "device": upload.device,
            "round": upload.round,
            "samples": upload.samples,
            "steps": upload.steps,
        }
        for upload, _ in results
    ]
    return {"uploads": uploads, "layout": region.write(groups)}


def unpack_uploads(value: dict[str, Any], groups: dict[str, Tensors]) -> list[tuple[Upload, Tensors]]:
    """The uploads and the new states of their devices."""
    results = []
    for i, fields in enumerate(value["uploads"]):
        weights, extra = groups.get(f"{i}/weights", {}), groups.get(f"{i}/extra", {})
        finite = all_finite(weights) and all_finite(extra)
        state = groups.get(f"{i}/memory", {})
        results.append((Upload(**fields, weights=weights, extra=extra, finite=finite), state))
    return results


def pack_answers(answers: list[Answer], region: Region) -> dict[str, Any]:
    layout = region.write({str(answer.device): answer.tensors for answer in answers})
    values = [[answer.device, dict(answer.values)] for answer in answers]
    return {"answers": values, "layout": layout}


def unpack_answers(value: dict[str, Any], groups: dict[str, Tensors]) -> list[Answer]:
    return [Answer(device, values, groups.get(str(device), {})) for device, values in value["answers"]]


def _read_jobs(lines: TextIO, jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        for line in lines:
            jobs.put(json.loads(line))
    finally:
        os._exit(0)  # the parent exited, perhaps in the middle of a line: its result is not needed any more


def main(fds: Sequence[int]) -> None:
    """Run jobs forever. `fds` are the file descriptors of jobs, replies and the regions."""
    lines = os.fdopen(fds[0], encoding="utf-8")
    replies = os.fdopen(fds[1], "w", encoding="utf-8", buffering=1)
    down, fixed, *up = (Region(fd) for fd in fds[2:])
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(lines, jobs), daemon=True).start()
    with deterministic():
        worker: Worker | None = None
        while True:
            job = jobs.get()
            try:
                if worker is None:
                    worker = Worker(job, down, fixed, up)
                    reply: dict[str, Any] = {"ready": os.getpid()}
                else:
                    reply = worker.run(job)
            except FeddumapError as error:
                reply = {"error": str(error)}
            except Exception:  # sent to the parent, which raises it there
                reply = {"bug": traceback.format_exc()}
            print(json.dumps(reply), file=replies, flush=True)
