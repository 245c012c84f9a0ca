"""Data sets of the user's own: what each format becomes, how it is cached, and a run on each."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feddumap import run as api
from feddumap.config import Config, DataConfig
from feddumap.core.rng import stream
from feddumap.core.tensors import digest
from feddumap.data import cache
from feddumap.data.dataset import Dataset
from feddumap.data.sources import catalog
from feddumap.errors import FeddumapError

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (10, 12, 9), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (10, 12, 9, 3), dtype=np.uint8)
NUMBERS = RNG.normal(size=(10, 3))
LABELS = np.arange(10) % 2
ORDER = stream(0, "data", "test").permutation(10)
TEST_ROWS, TRAIN_ROWS = np.sort(ORDER[:2]), ORDER[2:]  # of a drawn test part
SHUFFLED = stream(0, "data", "order").permutation(10)  # if the test part is given


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDUMAP_HOME", str(tmp_path / "home"))


def get(path: Path, say: Callable[[str], None] = lambda _: None, **keys: Any) -> Dataset:
    return catalog.get(DataConfig(name=str(path), **keys), say=say)


def png(image: np.ndarray, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, form)
    return file.getvalue()


def write_npz(path: Path, train: np.ndarray, **more: Any) -> Path:
    arrays = {
        "train_inputs": train,
        "train_labels": LABELS,
        "test_inputs": train[:4],
        "test_labels": LABELS[:4],
    }
    np.savez(path, **{key: value for key, value in (arrays | more).items() if value is not None})
    return path


# --- .npz ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "described", "stored"),
    [
        (GREY, "image 1×12×9", GREY[..., None]),
        (COLOUR, "image 3×12×9", COLOUR),
        (COLOUR.transpose(0, 3, 1, 2), "image 3×12×9", COLOUR),
        (COLOUR[..., :1].transpose(0, 3, 1, 2), "image 1×12×9", COLOUR[..., :1]),
        (np.concatenate([COLOUR, COLOUR[..., :1]], axis=-1), "image 4×12×9", None),
        (NUMBERS, "numbers 3", NUMBERS.astype(np.float32)),
        (NUMBERS[:, 0], "numbers 1", NUMBERS[:, :1].astype(np.float32)),
        (NUMBERS.reshape(10, 1, 3, 1), "numbers 1×3×1", None),
        (np.arange(40, dtype=np.int32).reshape(10, 4), "tokens 4 of 40", np.arange(40).reshape(10, 4)),
    ],
)
def test_npz_kinds(given: np.ndarray, described: str, stored: np.ndarray | None, tmp_path: Path) -> None:
    found = get(write_npz(tmp_path / "own.npz", given))
    assert found.input.describe() == described
    expected = given if stored is None else stored
    assert np.array_equal(found.train_inputs, expected.astype(found.train_inputs.dtype))
    assert np.array_equal(found.test_inputs, expected[:4].astype(found.train_inputs.dtype))
    assert found.classes == ("0", "1")
    assert found.name == "own.npz"
    if found.input.kind == "image":
        assert (found.input.crop, found.input.flip) == (1, False)


def test_npz_older_names_classes_users_and_kind(tmp_path: Path) -> None:
    older = {"train_inputs": None, "test_inputs": None, "train_images": GREY, "test_images": GREY[:4]}
    users = np.array(["b", "a", "", "b", "a", "a", "a", "a", "a", "c"])
    path = write_npz(
        tmp_path / "own.npz",
        GREY,
        **older,
        classes=np.array(["x", "y"]),
        train_users=users,
        test_users=users[:4],
    )
    found = get(path)
    assert found.classes == ("x", "y")
    assert found.users == ("a", "b", "c")
    assert found.train_users is not None
    assert found.train_users.tolist() == [1, 0, -1, 1, 0, 0, 0, 0, 0, 2]
    assert np.array_equal(found.test_users, found.train_users[:4])
    numbers = get(path, kind="numbers")
    assert numbers.input.describe() == "numbers 12×9"
    assert np.array_equal(numbers.train_inputs, GREY.astype(np.float32))


def test_npz_integer_users_and_a_drawn_test_part(tmp_path: Path) -> None:
    users = np.array([10, 9, -1, 9, 10, 9, 9, 9, 9, 2])
    path = write_npz(tmp_path / "a.npz", NUMBERS, test_inputs=None, test_labels=None, train_users=users)
    found = get(path, test_fraction=0.2)
    assert found.users == ("2", "9", "10"), "in the order of the numbers"
    rows = np.sort(TRAIN_ROWS)  # the file's order
    assert np.array_equal(found.train_inputs, NUMBERS[rows].astype(np.float32))
    assert np.array_equal(found.test_labels, LABELS[TEST_ROWS])
    assert found.train_users is not None
    assert [found.users[user] if user >= 0 else "-1" for user in found.train_users] == list(
        map(str, users[rows])
    )


def test_input_settings(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "own.npz", COLOUR)
    plain = get(path)
    given = get(path, crop=2, flip=True, mean=[0.1, 0.2, 0.3], std=[0.5])
    assert (given.input.crop, given.input.flip, given.input.mean) == (2, True, (0.1, 0.2, 0.3))
    assert given.folder == plain.folder, "they do not change what is stored"
    tokens = write_npz(tmp_path / "t.npz", np.arange(40).reshape(10, 4))
    assert get(tokens, vocabulary=99).input.vocabulary == 99


# --- folders -------------------------------------------------------------------------------------------


def write_folder(root: Path, images: np.ndarray, form: str = "png") -> Path:
    for row, image in enumerate(images):
        folder = root / ("cat" if LABELS[row] else "ant")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{row:02d}.{form}")
    return root


def test_folder_of_one_set(tmp_path: Path) -> None:
    found = get(write_folder(tmp_path / "pets", GREY))
    order = np.argsort(LABELS, kind="stable")  # folder by folder
    assert found.input.describe() == "image 1×12×9"
    assert np.array_equal(found.train_inputs[..., 0], GREY[order][TRAIN_ROWS])
    assert np.array_equal(found.test_inputs[..., 0], GREY[order][TEST_ROWS])
    assert found.classes == ("ant", "cat")
    assert np.array_equal(found.test_labels, LABELS[order][TEST_ROWS])


def test_folder_with_parts_and_mixed_colours(tmp_path: Path) -> None:
    write_folder(tmp_path / "pets" / "train", COLOUR)
    write_folder(tmp_path / "pets" / "test", GREY[:4])
    found = get(tmp_path / "pets")
    assert found.input.describe() == "image 3×12×9"
    assert len(found.train_labels) == 10
    assert np.array_equal(found.test_inputs, np.repeat(GREY[[0, 2, 1, 3], ..., None], 3, axis=-1))
    other = write_folder(tmp_path / "elsewhere", COLOUR[:4])
    given = get(write_folder(tmp_path / "only", COLOUR), test=str(other))
    assert np.array_equal(given.test_inputs, COLOUR[[0, 2, 1, 3]])


def test_folder_sizes(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", GREY)
    Image.fromarray(GREY[0].T.copy()).save(root / "ant" / "90.png")
    with pytest.raises(
        FeddumapError, match=r"90.png is 12 by 9 pixels, .*00.png is 9 by 12 pixels: .*data.size"
    ):
        get(root)
    said: list[str] = []
    assert get(root, said.append, size=16).input.describe() == "image 1×16×16"
    assert f"{root}: 11 of 11 images were resized to 16 by 16 pixels" in said
    assert get(root, size=[12, 9]).input.shape == (1, 12, 9)


# --- tables --------------------------------------------------------------------------------------------


def as_csv(table: pa.Table, path: Path) -> Path:
    pyarrow.csv.write_csv(table, path.with_suffix(".csv"))
    return path.with_suffix(".csv")


def as_parquet(table: pa.Table, path: Path) -> Path:
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=3)
    return path.with_suffix(".parquet")


TABLE = pa.table(
    {
        "a": NUMBERS[:, 0],
        "n": np.arange(10),
        "sick": np.arange(10) % 3 == 0,
        "class": ["dog" if label else "bee" for label in LABELS],
        "who": ["u1", "u2", "", "u1", "u2", "u1", "u2", "u1", "u2", "u1"],
    }
)


@pytest.mark.parametrize("write", [as_csv, as_parquet])
def test_table_of_numbers(write: Callable[[pa.Table, Path], Path], tmp_path: Path) -> None:
    path = write(TABLE, tmp_path / "t")
    found = get(path, label="class", user="who")
    matrix = np.stack([NUMBERS[:, 0], np.arange(10), np.arange(10) % 3 == 0], axis=1).astype(np.float32)
    assert found.input.describe() == "numbers 3"
    assert np.array_equal(found.train_inputs, matrix[TRAIN_ROWS])
    assert found.classes == ("bee", "dog")
    assert np.array_equal(found.test_labels, LABELS[TEST_ROWS])
    assert found.users == ("u1", "u2")
    some = get(path, label="class", input=["n", "a"], test=str(path))
    assert np.array_equal(some.test_inputs, matrix[:, [1, 0]])
    one = get(path, label="class", input="n", kind="tokens")
    assert one.input.describe() == "tokens 1 of 10"


def test_table_of_images(tmp_path: Path) -> None:
    rows = [{"bytes": png(image, "WEBP" if i else "PNG"), "path": None} for i, image in enumerate(COLOUR)]
    struct = get(as_parquet(pa.table({"img": rows, "label": LABELS}), tmp_path / "s"))
    assert struct.input.describe() == "image 3×12×9"
    plain = as_parquet(pa.table({"img": [png(image) for image in GREY], "label": LABELS}), tmp_path / "b")
    assert np.array_equal(get(plain).train_inputs[..., 0], GREY[TRAIN_ROWS])
    assert get(plain, size=8).input.describe() == "image 1×8×8"


def test_table_of_sequences(tmp_path: Path) -> None:
    ints = as_parquet(pa.table({"x": [[i, 3, 7] for i in range(10)], "label": LABELS}), tmp_path / "i")
    assert get(ints).input.describe() == "tokens 3 of 10"
    assert get(ints, length=5).train_inputs[0].tolist() == [int(TRAIN_ROWS[0]), 3, 7, 0, 0]
    ragged = as_parquet(pa.table({"x": [[1] * (i + 1) for i in range(10)], "label": LABELS}), tmp_path / "r")
    with pytest.raises(FeddumapError, match=r"r.parquet: row 2 of the column x has 2 values, row 1 has 1"):
        get(ragged)
    assert get(ragged, length=4).train_inputs.max(axis=1).tolist() == [1] * 8
    floats = as_parquet(pa.table({"x": NUMBERS.tolist(), "label": LABELS}), tmp_path / "f")
    assert np.array_equal(get(floats).train_inputs, NUMBERS[TRAIN_ROWS].astype(np.float32))
    nested = pa.table({"x": NUMBERS.reshape(10, 1, 3).tolist(), "label": LABELS})
    assert get(as_parquet(nested, tmp_path / "n")).input.describe() == "numbers 1×3"


@pytest.mark.parametrize("write", [as_csv, as_parquet])
def test_table_of_text(write: Callable[[pa.Table, Path], Path], tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(9)] + ["é" * 10]
    path = write(pa.table({"text": texts, "label": LABELS}), tmp_path / "t")
    found = get(path)
    assert found.input.describe() == "tokens 256 of 257"
    first = found.train_inputs[0]
    assert bytes((first[first > 0] - 1).tolist()).decode() == texts[TRAIN_ROWS[0]]
    said: list[str] = []
    assert get(path, said.append, length=15).input.shape == (15,)
    assert sum("1 of 10 texts are longer than 15 bytes" in line for line in said) == 1


# --- the cache -----------------------------------------------------------------------------------------


def test_cache_depends_on_content_and_keys(tmp_path: Path) -> None:
    path = as_csv(TABLE, tmp_path / "t")
    first = get(path, label="class", input="a")
    assert get(path, label="class", input="n").folder != first.folder
    said: list[str] = []
    assert get(path, said.append, label="class", input="a").folder == first.folder
    assert "from the cache" in said[0]
    path.write_text(path.read_text().replace("bee", "ant"))
    assert get(path, label="class", input="a").classes == ("ant", "dog")
    root = write_folder(tmp_path / "pets", GREY)
    before = get(root).folder
    (root / "ant" / "00.png").rename(root / "ant" / "0.png")
    assert get(root).folder != before
    names = [row.name for row in catalog.available() if row.cached]
    assert sorted(names) == ["pets", "pets", "t.csv", "t.csv", "t.csv"]
    assert cache.read(before).source == f"the folder {root}"


# --- a run on each kind --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "numbers"])
def test_runs_give_the_same_bits_with_workers(kind: str, tmp_path: Path) -> None:
    rng, labels = np.random.default_rng(1), np.arange(80) % 2
    if kind == "image":
        inputs: Any = (rng.integers(0, 100, (80, 9, 9)) + 100 * labels[:, None, None]).astype(np.uint8)
    else:
        inputs = rng.normal(size=(80, 5)) + 2 * labels[:, None]
    np.savez(tmp_path / "own.npz", train_inputs=inputs, train_labels=labels)
    config = Config.parse(
        {
            "data": {"name": str(tmp_path / "own.npz"), "test_fraction": 0.25, "devices": 4},
            "model": {"name": "mlp"},
            "train": {"rounds": 2, "cohort": 2, "epochs": 2, "batch": 8},
            "clock": {"profile": "general"},
        }
    )
    runs = [api.train(config.replace(run={"workers": workers})) for workers in (1, 2)]
    assert digest(runs[0].state.weights) == digest(runs[1].state.weights)
    assert runs[0].records[-1]["accuracy"] == runs[1].records[-1]["accuracy"] > 0.8
