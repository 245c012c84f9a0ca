"""Every mistake in a user's data is one sentence that names the file and, where there is one, the row."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feddumap.config import DataConfig
from feddumap.data.sources import catalog, memory
from feddumap.errors import FeddumapError


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDUMAP_HOME", str(tmp_path / "home"))


def refused(message: str, path: Path, **keys: Any) -> None:
    """The error is one sentence with the file, nothing is cached, and a second try says the same."""
    for _ in range(2):
        with pytest.raises(FeddumapError, match=message) as caught:
            catalog.get(DataConfig(name=str(path), **keys))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not [row for row in catalog.available() if row.cached]


NAN = np.ones((6, 3))
NAN[4, 1] = np.nan


def test_a_file_of_other_arrays_names_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", x=np.ones((6, 3)), y=np.arange(6))
    with pytest.raises(FeddumapError, match=r"test_labels: it has 'x', 'y'$"):
        catalog.get(str(tmp_path / "c.npz"))


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        (
            {"test_labels": None},
            {},
            "lacks test_labels: expected train_inputs, .*, but it has 'train_inputs', 'train_labels'",
        ),
        ({"train_inputs": np.array(["a"] * 6)}, {}, r"train_inputs is <U1 \(6,\): expected images"),
        ({"train_inputs": np.zeros((6, 3), bool)}, {}, r"train_inputs is bool \(6, 3\): expected images"),
        ({"train_inputs": np.zeros((6, 2, 2, 2), np.uint8)}, {}, r"uint8 \(6, 2, 2, 2\): expected uint8 \(N"),
        ({}, {"kind": "image"}, r"train_inputs is float64 \(6, 3\): expected uint8"),
        ({"train_inputs": np.array(3.0)}, {}, r"train_inputs is float64 \(\)"),
        ({"train_inputs": NAN}, {}, "row 4 of train_inputs has the value nan: expected finite"),
        ({"test_inputs": np.full((4, 3), 1e300)}, {}, "row 0 of test_inputs has the value inf"),
        ({"test_inputs": np.zeros((4, 2))}, {}, r"row 0 of the test part is numbers \(2,\), the training"),
        ({"test_inputs": np.zeros((0, 3))}, {}, r"test_inputs is float64 \(0, 3\)"),
        ({"train_inputs": np.array([[0, 1]] * 5 + [[2, -3]])}, {}, "row 5 of train_inputs has the token -3"),
        ({"train_labels": np.zeros(6)}, {}, r"train_labels is float64 \(6,\): expected integers or strings"),
        ({"train_labels": np.zeros((6, 1), int)}, {}, r"train_labels is int64 \(6, 1\)"),
        ({"train_labels": np.array([0, 1, 2, 1, 0])}, {}, "train part has 6 inputs and 5 labels"),
        ({"train_labels": np.array([0, 1, 2, 0, 1, -2])}, {}, "row 5 of the train part has the label -2"),
        ({"test_labels": np.array([0, 1, 2, 9])}, {}, "row 3 of the test part has the label 9 but .* only 6"),
        ({"test_labels": np.array([0, 1, 3, 2])}, {}, "no training sample of the class 3: add some"),
        ({"classes": np.array(["a", "b"])}, {}, "row 2 of the train part has the label 2: expected 0 to 1"),
        ({"classes": np.array(["a", "b", "c", "d"])}, {}, "no training sample of the class d"),
        ({"classes": np.array(["a", "b", "a"])}, {}, "classes is not a unicode array of distinct names"),
        ({"classes": np.arange(3)}, {}, "classes is not a unicode array of distinct names"),
        (
            {"classes": np.array(["a", None, "c"], object)},
            {},
            "not a readable .npz file .*allow_pickle",
        ),
        (
            {"train_labels": np.zeros(6, int), "test_labels": np.zeros(4, int)},
            {},
            "has 1 class, expected two",
        ),
        ({"train_users": np.zeros(6)}, {}, r"train_users is float64 \(6,\): expected strings or integers"),
        ({"train_users": np.zeros(5, int)}, {}, "train part has 6 inputs and 5 users"),
        ({"test_users": np.zeros(4, int)}, {}, "test part says whose its samples are"),
        ({}, {"size": 8}, "data.size = 8: .* is an .npz file, for which it has no meaning"),
        ({}, {"test_fraction": 0.5}, "data.test_fraction = 0.5: .* has a test part of its own"),
        ({}, {"label": "y"}, "data.label = 'y': .* is an .npz file"),
    ],
)
def test_npz(changes: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "train_inputs": np.ones((6, 3)),
        "train_labels": np.array([0, 1, 2, 0, 1, 2], np.uint8),
        "test_inputs": np.ones((4, 3)),
        "test_labels": np.array([2, 1, 0, 0]),
    } | changes
    np.savez(tmp_path / "own.npz", **{key: value for key, value in arrays.items() if value is not None})
    refused(message, tmp_path / "own.npz", **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"crop": 2}, "data.crop = 2: the input is numbers 3, no image"),
        ({"mean": [0.0]}, "data.mean and data.std: one is set"),
        ({"mean": [0.0, 1.0], "std": [1.0]}, "data.mean has 2 numbers: expected 1 or 3 numbers"),
    ],
)
def test_input_settings(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    inputs, labels = np.ones((6, 3)), np.arange(6) % 2
    path = tmp_path / "own.npz"
    np.savez(path, train_inputs=inputs, train_labels=labels, test_inputs=inputs, test_labels=labels)
    with pytest.raises(FeddumapError, match=message):
        catalog.get(DataConfig(name=str(path), **keys))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("own.npz", truncated, "not a readable .npz file"),
        ("own.npz", Path.unlink, "cannot read the data set: no file or folder .*"),
        ("own.npz", lambda path: path.write_bytes(b""), "not a readable .npz file"),
        ("own.npz", lambda path: path.write_bytes(_single()), "holds a single array"),
        ("own.parquet", truncated, "not a readable Parquet file"),
        ("own.parquet", lambda path: path.write_bytes(b""), "not a readable Parquet file"),
        ("own.parquet", Path.unlink, "cannot read the data set: no file or folder .*"),
        ("own.csv", lambda path: path.write_text(""), r"not a readable CSV file \(Empty CSV file\)"),
        ("own.csv", lambda path: path.write_text("a,label\n"), "has no rows"),
        ("own.csv", lambda path: path.write_text("a,label\n1,0\n2\n"), r"not a readable CSV file .*Row #3"),
        (
            "own.csv",
            lambda path: path.write_bytes(b"a,label\n\xff\xfe,1\n"),
            "row 1 of the column a is not UTF-8",
        ),
        ("own.csv", Path.unlink, "cannot read the data set: no file or folder .*"),
    ],
)
def test_files(name: str, damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    np.savez(tmp_path / "own.npz", train_inputs=np.ones((6, 3)), train_labels=np.arange(6))
    pq.write_table(pa.table({"a": np.ones(6), "label": np.arange(6)}), tmp_path / "own.parquet")
    (tmp_path / "own.csv").write_text("a,label\n1,0\n2,1\n")
    damage(path)
    refused(message, path)


def _single() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def png(side: int = 4, mode: str = "L") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (side, side)).save(file, "PNG")
    return file.getvalue()


def with_null(values: list[Any], row: int, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array([None if i == row else value for i, value in enumerate(values)], kind)


LABELS = [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("columns", "keys", "message"),
    [
        ({}, {"label": "kind"}, r"has no column kind \(data.label\): it has x, label"),
        ({}, {"user": "who"}, r"has no column who \(data.user\)"),
        ({}, {"input": ["x", "y"]}, r"has no column y \(data.input\)"),
        ({"x": None}, {}, "has no column for the input: it has label"),
        ({"x": with_null([1.5] * 6, 3)}, {}, "row 4 of the column x is empty"),
        ({"x": [1.0, np.inf, 0, 0, 0, 0]}, {}, "row 2 has the value inf"),
        ({"note": ["1", "1.5", "a", "", "1", "1"]}, {}, "the column note has 'a' in row 3: expected numbers"),
        (
            {"x": pa.array([0] * 6, pa.timestamp("ms"))},
            {},
            r"the column x is timestamp\[ms\]: expected numbers",
        ),
        (
            {"label": [0.0, 1.0] * 3},
            {},
            r"the column label \(the label\) is double: expected integers or str",
        ),
        ({"label": with_null(LABELS, 2)}, {}, "row 3 of the column label is empty"),
        ({"label": [0, 1, 0, 1, 0, 7]}, {}, "row 6 has the label 7 but there are only 6 training samples"),
        ({"label": [0, 1, -1, 1, 0, 1]}, {}, "row 3 has the label -1: expected 0 to 1"),
        ({"label": [0, 0, 0, 0, 0, 0]}, {}, "has 1 class, expected two"),
        (
            {"label": ["a", "b", "c", "d", "e", "f"]},
            {},
            "no training sample of the class .*data.test",
        ),
        ({"who": [0.5] * 6}, {"user": "who"}, r"the column who \(the user\) is double: expected strings"),
        ({"x": with_null(["text"] * 6, 1)}, {}, "row 2 of the column x is empty"),
        ({"x": with_null([png()] * 6, 1, pa.binary())}, {}, "row 2 of the column x is empty"),
        ({"x": [png()] * 5 + [b"no"]}, {}, "row 6 cannot be decoded"),
        ({"x": [png()] * 5 + [png(5)]}, {}, "row 6 is 5 by 5 pixels, .*row 1 is 4 by 4"),
        ({"x": [png(mode="I;16")] * 6}, {}, "row 1 has more than 8 bits per pixel"),
        ({"x": [{"bytes": None, "path": "/no/such.png"}] * 6}, {}, "row 1 .* names the image /no/such.png"),
        ({"x": [[1], [1, 2]] * 3}, {}, "row 2 of the column x has 2 values, row 1 has 1: .*data.length"),
        ({"x": [[1.0, None]] * 6}, {}, "row 1 of the column x has a missing value"),
        ({"x": [["a"]] * 6}, {}, "is list<.*string>: expected lists of numbers"),
        ({"x": [[1, 2]] * 5 + [[1, -2]]}, {}, "row 6 has the token -2"),
        ({"x": [[1, 2]] * 5 + [[1, 9]]}, {"vocabulary": 5}, "row 6 has the token 9: expected 0 to 4"),
        ({"x": [[1.5]] * 6}, {"length": 4}, "data.length = 4: .*list of integers"),
        ({}, {"length": 4}, "data.length = 4: .* has no sequences"),
        ({}, {"size": 4}, "data.size = 4: .* has no images"),
        ({}, {"test": "own.txt", "test_fraction": 0.1}, "data.test_fraction = 0.1: data.test = 'own.txt'"),
    ],
)
def test_tables(columns: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    table = {"x": [1.5] * 6, "label": LABELS} | columns
    made = pa.table({name: values for name, values in table.items() if values is not None})
    pq.write_table(made, tmp_path / "own.parquet")
    (tmp_path / "own.txt").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        if keys.get("test"):
            with pytest.raises(FeddumapError, match=message):
                catalog.get(DataConfig(name="own.parquet", **keys))
        else:
            refused(message, tmp_path / "own.parquet", **keys)


def test_a_test_part_that_does_not_fit(tmp_path: Path) -> None:
    path, other = tmp_path / "own.parquet", tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1.5] * 6, "label": ["a", "b"] * 3}), path)
    for columns, message in (
        ({"x": [1.5], "label": ["c"]}, "no training sample of the class c"),
        ({"x": [1.5], "label": [1]}, "other.parquet has labels of another type"),
        (
            {"x": [[1, 2]], "label": ["a"]},
            r"other.parquet: row 1 is tokens \(2,\), the training part",
        ),
        ({"y": [1.5], "label": ["a"], "x": ["?"]}, "expected numbers"),
    ):
        pq.write_table(pa.table(columns), other)
        with pytest.raises(FeddumapError, match=message):
            catalog.get(DataConfig(name=str(path), test=str(other)))
    with pytest.raises(FeddumapError, match=r"cannot read the data set: no file or folder .*nowhere.parquet"):
        catalog.get(DataConfig(name=str(path), test=str(tmp_path / "nowhere.parquet")))


def test_folders(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    root.mkdir()
    refused("has no images: expected a sub-folder of PNG or JPEG images per class", root)
    for row, name in enumerate(["ant", "bee"] * 5):
        (root / name).mkdir(exist_ok=True)
        (root / name / f"{row}.png").write_bytes(png())
    refused("data.kind = 'tokens': .* is a folder of images", root, kind="tokens")
    refused("data.user = 'x': .* is a folder of images", root, user="x")
    (root / "bee" / "x.jpg").write_bytes(b"nothing")
    refused(r"bee/x.jpg cannot be decoded .*: replace or remove it", root)
    (root / "bee" / "x.jpg").unlink()
    (root / "cow").mkdir()
    (root / "cow" / "1.png").write_bytes(png())
    found = catalog.get(DataConfig(name=str(root), test_fraction=0.1))
    assert found.classes == ("ant", "bee", "cow")


def test_what_does_not_fit_into_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 100)
    rows = {"train_inputs": np.ones((6, 3)), "train_labels": np.arange(6)}
    np.savez_compressed(tmp_path / "own.npz", **rows)
    refused(
        "declares .* of data, but this machine has 0.1 KB of memory", tmp_path / "own.npz", test_fraction=0.5
    )
    pq.write_table(pa.table({"x": [png()] * 6, "label": LABELS}), tmp_path / "own.parquet")
    refused("declares .* of data, but this machine has 0.1 KB", tmp_path / "own.parquet")


def test_a_missing_path_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the folder in which a relative path was looked for."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FeddumapError, match=r"unknown data set 'nothing': known: .*\.parquet or \.csv"
    ) as found:
        catalog.get("nothing")
    assert str(found.value).endswith(f"; data.name: no file or folder 'nothing' in {tmp_path}")
    with pytest.raises(FeddumapError, match=r"no file or folder '/absent/nothing'$"):
        catalog.get("/absent/nothing")
    for name in ("nothing.npz", "nothing.csv"):
        with pytest.raises(FeddumapError, match=f"no file or folder '{name}' in {tmp_path}$"):
            catalog.get(name)
    with pytest.raises(FeddumapError, match=r"'nothing\.txt'"):
        catalog.get("nothing.txt")
