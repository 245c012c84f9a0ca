"""What the fuzzers call with bytes: every reader of what others may have written. Each returns normally or
raises `FeddumapError`; anything else is a finding."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from PIL import Image

from feddumap import config as configuration
from feddumap.config import Config, DataConfig
from feddumap.core.messages import Broadcast, InputSpec, Question
from feddumap.data.sources import cifar, device_files, folder, npz, tables
from feddumap.data.sources.array_rows import array_rows
from feddumap.errors import escape_controls
from feddumap.flower import codec, handshake, replies, requests
from feddumap.models import architecture, initialise
from feddumap.runs import inspect, reader
from feddumap.system.callbacks import ignore

WORK = Path(tempfile.mkdtemp(prefix="feddumap-fuzz-"))
SHAPE = architecture("lenet", 10)
WEIGHTS = initialise(SHAPE, 1)
MESSAGE = Broadcast(3, SHAPE, WEIGHTS, 0.05)
REQUEST = requests.Request(
    "0123456789abcdef" * 2, 5, 3, 0.05, SHAPE, Config(), tuple(map(str, range(10))), None
)
CENSUS = Question("census", {"labels": "counts"})
RECORD = {
    "round": 0, "accuracy": 0.5, "loss": 1.0, "lr": 0.1, "devices": [1], "samples": 4, "parameters": 9,
    "macs": 9, "bytes_down": 1, "bytes_up": 1, "clock": 1.0, "wall": 1.0,
    "lost": {"3": "late"}, "device_accuracy": {"mean": 0.5, "worst_tenth": 0.1, "spread": 0.1, "devices": 3},
}  # fmt: skip


def _file(name: str, data: bytes) -> Path:
    path = WORK / name
    path.write_bytes(data)
    return path


def toml(data: bytes) -> None:
    configuration.load(_file("config.toml", data))


def sets(data: bytes) -> None:
    configuration.load(None, data.decode("utf-8", "surrogateescape").split("\n"))


def records(data: bytes) -> None:
    directory = WORK / "run"
    directory.mkdir(exist_ok=True)
    (directory / "config.toml").write_text(tomli_w.dumps(Config().to_toml()))
    (directory / "records.jsonl").write_bytes(data)
    inspect.describe(directory)


def checkpoint(data: bytes) -> None:
    """The JSON of a checkpoint, with checksums that match if it is JSON."""
    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict):
            value.pop("sha256", None)
            data = json.dumps({**value, "sha256": reader.digest(value)}).encode()
    reader.read_checkpoint(_file("checkpoint-000001.json", data))


def _record(data: bytes) -> ArrayRecord:
    return ArrayRecord({codec.NAME: Array("uint8", (len(data),), codec.PACKED, data)})


def tensors(data: bytes) -> None:
    numbers = ConfigRecord({"device": 5, "round": 3, "samples": 40, "steps": 8})
    replies.read_upload(RecordDict({"upload": numbers, "weights": _record(data)}), MESSAGE, 5)
    replies.read_answer(RecordDict({"answer": numbers, "tensors": _record(data)}), CENSUS, MESSAGE, 5)
    requests.read_broadcast(RecordDict({"weights": _record(data), "mask": _record(data)}), REQUEST)


def messages(data: bytes) -> None:
    """Texts of messages: a line for each field."""
    lines = [*data.decode("utf-8", "replace").split("\n"), "", "", "", ""]
    order = ConfigRecord(
        {"token": REQUEST.token, "device": 5, "round": 3, "lr": 0.1, "architecture": lines[0],
         "config": lines[1], "classes": [str(number) for number in range(10)]}
    )  # fmt: skip
    question = ConfigRecord({"name": lines[2], "settings": lines[3], "light": True})
    found = requests.read_request(RecordDict({"order": order, "question": question}))
    _printable(found)
    _printable(replies.read_upload(RecordDict({"refusal": ConfigRecord({"reason": lines[0]})}), MESSAGE, 5))
    hello = ConfigRecord({"device": 1, "own": True, "gift": False, "frozen": lines[0]})
    _printable(handshake.read_hello(RecordDict({"hello": hello}), 4))
    _printable(handshake.read_hello_request(RecordDict({"who": ConfigRecord({"token": lines[0]})})))
    rest = ConfigRecord({"json": lines[2]})
    answer = RecordDict({"answer": ConfigRecord({"device": 5, "round": 3}), "values-rest": rest})
    _printable(replies.read_answer(answer, CENSUS, MESSAGE, 5))


def _printable(found: object) -> None:
    if isinstance(found, codec.Refused):
        assert escape_controls(found.reason) == found.reason
        assert len(found.reason) <= codec.MOST_REASON


def npz_file(data: bytes) -> None:
    found = npz.arrays(_file("own.npz", data), ("inputs", "labels"))
    array_rows(found["inputs"], found["labels"], None, None, None, "own.npz", "device")


def csv(data: bytes) -> None:
    _table("own.csv", data)


def parquet(data: bytes) -> None:
    _table("own.parquet", data)


def _table(name: str, data: bytes) -> None:
    path, keys = _file(name, data), DataConfig()
    tables.rows(tables.read_table(path, keys), keys, name, ignore, stored=len(data))


def image(data: bytes) -> None:
    root = WORK / "images"
    (root / "a").mkdir(parents=True, exist_ok=True)
    (root / "a" / "1.png").write_bytes(data)
    device_files.read(root, ["a"], InputSpec("image", (3, 8, 8)))
    folder.list_images(root)


def pickled(data: bytes) -> None:
    cifar.read_batch(data, 1, "labels", "batch")


def _bytes(write: Callable[[Any], object]) -> bytes:
    raw = io.BytesIO()
    write(raw)
    return raw.getvalue()


def _png(kind: str, size: tuple[int, int] = (8, 8)) -> bytes:
    return _bytes(lambda raw: Image.new("RGB", size, (3, 4, 5)).save(raw, kind))


def _parquets() -> list[bytes]:
    labels = {"label": [0, 1, 0, 1]}
    columns = [
        {"x": [1.0, 2.0, 3.0, 4.0]},
        {"x": ["a", "b", "c", "d"]},
        {"x": [[1, 2], [3, 4], [5, 6], [7, 8]]},
        {"x": [{"bytes": _png("PNG"), "path": None}] * 4},
    ]
    return [
        _bytes(lambda raw, x=x, how=how: pq.write_table(pa.table({**x, **labels}), raw, compression=how))
        for x in columns
        for how in ("none", "zstd")
    ]


ARCHITECTURE = json.dumps(SHAPE.to_json())
CHECKPOINT = {
    "round": 1, "architecture": SHAPE.to_json(), "clock": 1.0, "wall": 1.0, "devices": {"1": 0},
    "tensors_sha256": "",
}  # fmt: skip
NASTY = [
    b"9" * 5000,
    b"[" * 2000,
    b"-1e999",
    b"\x1b[2J\xe2\x80\xae",
    b"0x" + b"f" * 5000,
    b'"\\ud800"',
    b"NaN",
]
"""Values that broke parsers, to be put anywhere."""


def _upload() -> bytes:
    return bytes(codec.pack(weights=WEIGHTS)["weights"][codec.NAME].data)


TARGETS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "toml": (toml, [tomli_w.dumps(Config().to_toml()).encode(), b"[train]\nrounds = 3\n"]),
    "set": (sets, [b"train.rounds=3\nmodel.name=lenet", b"data.size=[3, 4]", b"model.widths=[[1, 2], [3]]"]),
    "records": (records, [json.dumps(RECORD).encode() + b"\n"]),
    "checkpoint": (checkpoint, [json.dumps(CHECKPOINT).encode()]),
    "tensors": (tensors, [_upload()[:3000], b"\x10" + bytes(7) + b'[["w", "float32", [1]]]' + bytes(4)]),
    "messages": (messages, ["\n".join((ARCHITECTURE, "{}", "census", "{}")).encode()]),
    "npz": (
        npz_file,
        [
            _bytes(lambda raw: np.savez(raw, inputs=np.ones((2, 3)), labels=np.arange(2))),
            _bytes(lambda raw: np.savez_compressed(raw, inputs=np.ones((2, 3)), labels=np.arange(2))),
        ],
    ),
    "csv": (csv, [b"x,y,label\n1,2,a\n3,4,b\n", b"x,label\nword,0\nother,1\n"]),
    "parquet": (parquet, _parquets()),
    "image": (image, [_png("PNG"), _png("JPEG"), _png("WEBP")]),
    "pickle": (
        pickled,
        [b"\x80\x02}q\x00(U\x04dataq\x01T\x00\x0c\x00\x00" + bytes(3072) + b"U\x06labels]K\x01au."],
    ),
}

os.environ.setdefault("FEDDUMAP_HOME", str(WORK / "home"))
