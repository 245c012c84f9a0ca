"""A worker process: reads jobs as JSON lines, finds tensors in shared memory, answers in the same way.

It ends at once when its parent goes away, however that happened, since its standard input then closes.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, TextIO

from feddumap.cohort.desk import Desk, Examiner, SplitHoldings
from feddumap.cohort.region import Layout, Region
from feddumap.config import Config
from feddumap.data import dataset
from feddumap.data.partition import Split
from feddumap.errors import FeddumapError
from feddumap.models import network
from feddumap.runtime import exact_math
from feddumap.types import Answer, Architecture, Broadcast, Question, Tensors, Upload


class Worker:
    """What one process can do for the pool. `up` is this worker's own region, the others are shared.

    A device's memory comes in `up` too, before what it sends goes there.
    """

    def __init__(self, setup: dict[str, Any], down: Region, fixed: Region, up: Region) -> None:
        config = Config.parse(setup["config"])
        data = dataset.read(Path(setup["dataset"]), verify=False)
        arrays = {name: tensor.numpy() for name, tensor in fixed.read(setup["split"])["split"].items()}
        split = Split.from_arrays(arrays, len(data.train_labels))
        self._desk = Desk(config, SplitHoldings(data, split, config.run.seed))
        self._examiner = Examiner(data, config.run.device)
        self._down, self._up = down, up

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        broadcast = unpack_broadcast(job["broadcast"], self._down)
        match job["verb"]:
            case "train":
                memory = _copied(self._up, job["memory"]).get("memory", {})
                return pack_upload(*self._desk.train(broadcast, job["device"], memory), self._up)
            case "survey":
                question = Question(**job["question"])
                answers = [self._desk.answer(question, broadcast, device) for device in job["devices"]]
                return pack_answers(answers, self._up)
            case "evaluate":
                model = network(broadcast.architecture, broadcast.weights)
                scores = [self._examiner.chunk(model, start, stop) for start, stop in job["spans"]]
                return {"scores": [[score.correct, score.loss, score.count] for score in scores]}
            case verb:
                raise ValueError(f"no such job: {verb}")


def pack_broadcast(broadcast: Broadcast, region: Region) -> dict[str, Any]:
    groups = {"weights": broadcast.weights, "extra": broadcast.extra, "mask": broadcast.mask}
    return {
        "round": broadcast.round,
        "lr": broadcast.lr,
        "architecture": broadcast.architecture.to_json(),
        "layout": region.write(groups),
    }


def unpack_broadcast(value: dict[str, Any], region: Region) -> Broadcast:
    groups = region.read(value["layout"])
    return Broadcast(
        value["round"],
        Architecture.from_json(value["architecture"]),
        groups.get("weights", {}),
        value["lr"],
        extra=groups.get("extra", {}),
        mask=groups.get("mask", {}),
    )


def pack_upload(upload: Upload, kept: Tensors, region: Region) -> dict[str, Any]:
    return {
        "device": upload.device,
        "round": upload.round,
        "samples": upload.samples,
        "steps": upload.steps,
        "metrics": dict(upload.metrics),
        "layout": region.write({"weights": upload.weights, "extra": upload.extra, "memory": kept}),
    }


def unpack_upload(value: dict[str, Any], region: Region) -> tuple[Upload, Tensors]:
    """The upload, and what the device keeps, copied out so that the worker may write the next one."""
    groups = _copied(region, value["layout"])
    fields = {key: value[key] for key in ("device", "round", "samples", "steps", "metrics")}
    upload = Upload(**fields, weights=groups.get("weights", {}), extra=groups.get("extra", {}))
    return upload, groups.get("memory", {})


def pack_answers(answers: list[Answer], region: Region) -> dict[str, Any]:
    layout = region.write({str(answer.device): answer.tensors for answer in answers})
    values = [[answer.device, dict(answer.values)] for answer in answers]
    return {"answers": values, "layout": layout}


def unpack_answers(value: dict[str, Any], region: Region) -> list[Answer]:
    groups = _copied(region, value["layout"])
    return [Answer(device, values, groups.get(str(device), {})) for device, values in value["answers"]]


def _copied(region: Region, layout: Layout) -> dict[str, dict[str, Any]]:
    return {
        group: {name: tensor.clone() for name, tensor in tensors.items()}
        for group, tensors in region.read(layout).items()
    }


def _read_jobs(lines: TextIO, jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in lines:
        jobs.put(json.loads(line))
    os._exit(0)  # the parent is gone: do not finish a device nobody waits for


def main() -> None:
    # replies go to the real standard output; whatever else prints must not garble them
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    down, fixed, up = (Region(int(fd)) for fd in sys.argv[1:4])
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(sys.stdin, jobs), daemon=True).start()
    with exact_math():
        worker: Worker | None = None
        while True:
            job = jobs.get()
            try:
                if worker is None:
                    worker = Worker(job, down, fixed, up)
                    reply: dict[str, Any] = {"ready": os.getpid()}
                else:
                    reply = worker.do(job)
            except FeddumapError as error:
                reply = {"error": str(error)}
            except Exception:  # sent to the parent, which raises it there
                reply = {"bug": traceback.format_exc()}
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
