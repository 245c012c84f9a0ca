"""Data sets made in Python: from arrays, tensors and torch's data sets, shared with workers, and removed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.rng import stream
from feddumap.core.tensors import digest
from feddumap.data import shared_folder
from feddumap.data.in_memory import InMemoryDataset
from feddumap.data.sources import catalog
from feddumap.errors import FeddumapError

RNG = np.random.default_rng(0)
LABELS = np.arange(40) % 2
NUMBERS = (RNG.normal(size=(40, 5)) + 2 * LABELS[:, None]).astype(np.float32)
IMAGES = RNG.integers(0, 256, (40, 6, 7, 3), dtype=np.uint8)
ORDER = stream(0, "data", "order").permutation(40)  # a sorted data set is shuffled


def made(x: Any = NUMBERS, y: Any = LABELS, **more: Any) -> InMemoryDataset:
    return InMemoryDataset(train=(x, y), test=(x[:10], y[:10]), **more)


@pytest.mark.parametrize(
    ("x", "described", "stored"),
    [
        (NUMBERS, "numbers 5", NUMBERS),
        (torch.from_numpy(NUMBERS), "numbers 5", NUMBERS),
        (IMAGES, "image 3×6×7", IMAGES),
        (IMAGES[..., 0], "image 1×6×7", IMAGES[..., :1]),
        (torch.from_numpy(IMAGES).permute(0, 3, 1, 2), "image 3×6×7", IMAGES),
        (IMAGES / 255, "numbers 6×7×3", (IMAGES / 255).astype(np.float32)),
        (torch.arange(80).view(40, 2), "tokens 2 of 80", np.arange(80).reshape(40, 2)),
    ],
)
def test_arrays_and_tensors(x: Any, described: str, stored: np.ndarray) -> None:
    found = made(x, torch.from_numpy(LABELS)).open()
    assert found.input.describe() == described
    assert np.array_equal(found.train_inputs, stored[ORDER])
    assert np.array_equal(found.train_labels, LABELS[ORDER])
    assert np.array_equal(found.test_inputs, stored[:10])
    assert isinstance(found.train_inputs, np.memmap)
    assert not found.input.flip


class Pictures:
    """Like a data set of torchvision: PIL images with labels."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return Image.fromarray(IMAGES[row]), int(LABELS[row])


def test_pairs() -> None:
    pictures: Any = Pictures()
    found = InMemoryDataset(train=pictures, test=[pictures[i] for i in range(4)], flip=True, crop=2).open()
    assert np.array_equal(found.train_inputs, IMAGES[ORDER])
    assert np.array_equal(found.test_labels, LABELS[:4])
    assert (found.input.flip, found.input.crop) == (True, 2)
    tensors = TensorDataset(torch.from_numpy(NUMBERS), torch.from_numpy(LABELS))
    assert np.array_equal(InMemoryDataset(train=tensors, test=tensors).open().train_inputs, NUMBERS[ORDER])


def test_users_classes_and_a_drawn_test_part() -> None:
    users = ["b", None, "a", ""] * 10
    names = ["no" if not label else "yes" for label in LABELS]
    found = InMemoryDataset(train=(NUMBERS, names), users=users).open()
    assert (found.classes, found.users) == (("no", "yes"), ("a", "b"))
    assert (len(found.train_labels), len(found.test_labels)) == (32, 8)
    assert found.train_users is not None
    assert found.test_users is not None
    whose = {tuple(row): user for row, user in zip(NUMBERS.tolist(), users, strict=True)}
    for row, user in zip(found.test_inputs.tolist(), found.test_users, strict=True):
        assert (whose[tuple(row)] or None) == (None if user < 0 else found.users[user])


def test_the_digest_is_of_the_content() -> None:
    one = made()
    assert one.digest == made(torch.from_numpy(NUMBERS), name="other").digest
    others = [made(NUMBERS + 1), made(y=1 - LABELS), made(classes=["a", "b"]), made(users=LABELS)]
    assert len({one.digest, *(other.digest for other in others)}) == 5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": 3}, "train is a int: expected"),
        ({"train": [(1.0, 0), 5]}, "row 1 of train is a int: expected"),
        (
            {"train": [([1.0], 0), ([1.0, 2.0], 1)]},
            r"row 1 of train is float64 \(2,\), row 0 is",
        ),
        ({"train": []}, "train is empty"),
        ({"train": (NUMBERS, LABELS[:5])}, "train part has 40 inputs and 5 labels"),
        ({"train": ([[1.0], [1.0, 2.0]], [0, 1])}, "train_inputs is not an array"),
        ({"train": (np.full((40, 2), np.nan), LABELS)}, "row 0 of train_inputs has the value nan"),
        (
            {"train": (NUMBERS, LABELS), "users": ["a", 1.5] * 20},
            r"train_users: row 1 is 1.5: expected",
        ),
        ({"train": (NUMBERS, LABELS), "test_users": [1]}, "test_users are given without test"),
        ({"train": (NUMBERS, LABELS), "flip": True}, "data.flip = True: the input is numbers 5, no image"),
        (
            {"train": (NUMBERS, LABELS), "kind": "tokens"},
            r"is float32 \(40, 5\): expected integers",
        ),
        ({"train": (NUMBERS, LABELS), "classes": ["a"]}, "has 1 class"),
        ({"train": (NUMBERS, np.array([None] * 40))}, "train_labels is an array of objects"),
    ],
)
def test_mistakes(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(FeddumapError, match=message) as caught:
        InMemoryDataset(**keys)
    assert "\n" not in str(caught.value)


def test_the_folder_goes_with_the_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_folder, "SHARED_MEMORY", tmp_path)
    one = made()
    opened, name = one.open(), one.config_name
    assert opened.folder.is_relative_to(tmp_path)
    del one
    gc.collect()
    assert opened.folder.exists(), "an open data set keeps it"
    assert np.array_equal(catalog.get(name).train_inputs, NUMBERS[ORDER])
    del opened
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FeddumapError, match=r"was made in Python and is not in this .*feddumap.Run\(data="):
        catalog.get(name)


SCRIPT = """
import os, sys, numpy as np
from pathlib import Path
from feddumap.data import shared_folder
from feddumap.data.in_memory import InMemoryDataset
shared_folder.SHARED_MEMORY = Path(sys.argv[1])
data = InMemoryDataset(train=(np.eye(8), np.arange(8) % 2), test=(np.eye(8), np.arange(8) % 2))
if os.fork() == 0:
    sys.exit()  # a child's end removes nothing
os.wait()
print(data.folder.exists(), flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


@pytest.mark.slow
def test_the_folder_goes_with_the_process_even_if_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([*command, "wait"], **pipes) as killed,
        subprocess.Popen([*command, "exit"], **pipes) as ended,
    ):
        assert killed.stdout is not None
        assert ended.stdout is not None
        assert (killed.stdout.readline(), ended.stdout.readline()) == ("True\n", "True\n")
        ended.wait()
        assert len(list(tmp_path.iterdir())) == 1
        monkeypatch.setattr(shared_folder, "SHARED_MEMORY", tmp_path)
        mine = made()
        assert len(list(tmp_path.iterdir())) == 2, "that of a living process stays"
        os.kill(killed.pid, signal.SIGKILL)
    other = made(NUMBERS + 1)
    assert {data.folder.parent for data in (mine, other)} == set(tmp_path.iterdir())


def test_without_room_in_shared_memory_it_is_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_folder, "SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(shared_folder.tempfile, "gettempdir", lambda: str(tmp_path))
    assert made().folder.is_relative_to(tmp_path)
    monkeypatch.setattr(shared_folder, "_has_space", lambda place, size: False)
    with pytest.raises(FeddumapError, match=r"has 0\.00 GB left for the data"):
        made()


def test_a_run_with_workers_and_augmented_images() -> None:
    data = made(IMAGES, users=np.arange(40) % 4)
    config = Config.parse(
        {
            "data": {"name": data.config_name, "partition": "natural"},
            "model": {"name": "mlp"},
            "train": {"rounds": 2, "cohort": 2, "epochs": 1, "batch": 8},
            "clock": {"profile": "general"},
        }
    )
    runs = [api.train(config.replace(run={"workers": workers})) for workers in (1, 2)]
    assert runs[0].config.data.devices == 4
    assert digest(runs[0].state.weights) == digest(runs[1].state.weights)
