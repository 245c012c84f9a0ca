"""A device's own data in every format, which must fit the federation's input."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feddumap.config import DataConfig
from feddumap.core.messages import InputSpec
from feddumap.data.sources import device_files
from feddumap.errors import FeddumapError

COLOUR = InputSpec("image", (3, 32, 32))
GREY = InputSpec("image", (1, 8, 6))
NUMBERS = InputSpec("numbers", (2,))
TOKENS = InputSpec("tokens", (4,), vocabulary=10)
TEXT = InputSpec("tokens", (6,), vocabulary=257)
CLASSES = tuple("0123456789")
LABELS = np.array([3, 7, 3])
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_a_folder_of_images(tmp_path: Path) -> None:
    said: list[str] = []
    for i, label in enumerate(LABELS):
        (tmp_path / str(label)).mkdir(exist_ok=True)
        image = Image.fromarray(IMAGES[i])
        (image if i else image.resize((64, 64))).save(tmp_path / str(label) / f"{i}.png")
    (tmp_path / "3" / "notes.txt").write_text("mine")
    images, labels = device_files.read(tmp_path, CLASSES, COLOUR, said.append)
    assert labels.tolist() == [3, 3, 7]
    assert np.array_equal(images[1], IMAGES[2])
    assert said == [f"{tmp_path}: 1 of 3 images were resized to 32 by 32 pixels"]
    assert device_files.read(tmp_path, CLASSES, GREY)[0].shape == (3, 8, 6, 1)
    with pytest.raises(FeddumapError, match="a folder of images, but the federation's input is numbers 2"):
        device_files.read(tmp_path, CLASSES, NUMBERS)
    (tmp_path / "3" / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(FeddumapError, match=r"broken.jpg cannot be decoded"):
        device_files.read(tmp_path, CLASSES, COLOUR)
    (tmp_path / "cats").mkdir()
    with pytest.raises(FeddumapError, match=r"a folder 'cats', which is not a class of the federation"):
        device_files.read(tmp_path, CLASSES, COLOUR)


def test_images_in_files(tmp_path: Path) -> None:
    rows = {
        "image": [{"bytes": png(image), "path": None} for image in IMAGES],
        "label": LABELS,
        "id": [1, 2, 3],
    }
    pq.write_table(pa.table(rows), tmp_path / "d.parquet")
    np.savez(tmp_path / "d.npz", inputs=IMAGES, labels=LABELS)
    np.savez(tmp_path / "older.npz", images=IMAGES.transpose(0, 3, 1, 2), labels=LABELS)
    for name in ("d.parquet", "d.npz", "older.npz"):
        found, numbers = device_files.read(tmp_path / name, CLASSES, COLOUR)
        assert np.array_equal(found, IMAGES)
        assert found.flags.c_contiguous
        assert numbers.tolist() == LABELS.tolist()
    said: list[str] = []
    small = device_files.read(tmp_path / "d.parquet", CLASSES, GREY, said.append)[0]
    assert small.shape == (3, 8, 6, 1)
    assert said == [f"{tmp_path / 'd.parquet'}: 3 of 3 images were resized to 6 by 8 pixels"]


@pytest.mark.parametrize(
    ("given", "columns", "keys", "expected"),
    [
        (NUMBERS, {"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]}, {}, [[1, 0.5], [2, 1.5], [3, 2.5]]),
        (
            NUMBERS,
            {"b": [1, 2, 3], "c": [9, 9, 9], "a": [4, 5, 6]},
            {"input": ["a", "b"]},
            [[4, 1], [5, 2], [6, 3]],
        ),
        (TEXT, {"text": ["ab", "", "abcdefgh"]}, {}, [[98, 99, 0, 0, 0, 0], [0] * 6, list(range(98, 104))]),
        (TOKENS, {"w": [1, 2, 3], "x": [1, 2, 3], "y": [0, 0, 0], "z": [9, 9, 9]}, {}, None),
    ],
)
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables(given: InputSpec, columns: Any, keys: Any, expected: Any, form: str, tmp_path: Path) -> None:
    table, path = pa.table({**columns, "kind": ["3", "7", "3"]}), tmp_path / f"d.{form}"
    (pyarrow.csv.write_csv if form == "csv" else pq.write_table)(table, path)
    names = ["zero", "1", "2", "3", "4", "5", "6", "7"]
    asked = DataConfig(label="kind", **keys)
    if form == "csv":  # its labels are numbers then
        names = list(CLASSES)
    inputs, labels = device_files.read(path, names, given, columns=asked)
    assert labels.tolist() == [3, 7, 3]
    assert inputs.dtype == given.dtype
    wanted = expected if expected is not None else list(map(list, zip(*columns.values(), strict=True)))
    assert inputs.tolist() == wanted


def test_lists_are_padded_to_the_federations_length(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1, 2], [3], [4] * 9], "label": LABELS}), tmp_path / "d.parquet")
    found = device_files.read(tmp_path / "d.parquet", CLASSES, TOKENS)[0]
    assert found.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [4, 4, 4, 4]]


@pytest.mark.parametrize(
    ("arrays", "given", "message"),
    [
        ({"labels": [0, 1]}, NUMBERS, "has 3 inputs and 2 labels"),
        ({"labels": [0, 1, 10]}, NUMBERS, "row 2 .* has the label 10: expected 0 to 9"),
        ({"labels": ["0", "1", "x"]}, NUMBERS, "row 2 .* has the label x: expected one of 0, 1, 2"),
        (
            {"inputs": np.ones((3, 5))},
            NUMBERS,
            r"has inputs float32 \(5,\): expected float32 \(2,\), as",
        ),
        ({"inputs": np.full((3, 2), np.inf)}, NUMBERS, "row 0 of device_inputs has the value inf"),
        (
            {"inputs": np.ones((3, 8, 6), np.uint8)},
            COLOUR,
            r"\(8, 6, 1\): expected uint8 \(32, 32, 3\)",
        ),
        ({"inputs": np.full((3, 4), 11)}, TOKENS, "row 0 .* has the token 11: expected 0 to 9"),
        ({"inputs": np.ones((3, 4))}, TOKENS, r"is float64 \(3, 4\): expected integers"),
        ({"inputs": None}, NUMBERS, "lacks inputs: expected inputs, labels"),
    ],
)
def test_what_does_not_fit(arrays: dict[str, Any], given: InputSpec, message: str, tmp_path: Path) -> None:
    whole = {"inputs": np.ones((3, 2)), "labels": LABELS} | arrays
    np.savez(tmp_path / "d.npz", **{key: value for key, value in whole.items() if value is not None})
    with pytest.raises(FeddumapError, match=message) as caught:
        device_files.read(tmp_path / "d.npz", CLASSES, given)
    assert str(tmp_path / "d.npz") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FeddumapError, match=r"no such file or folder; expected a folder"):
        device_files.read(tmp_path / "nowhere", CLASSES, COLOUR)
