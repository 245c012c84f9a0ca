"""Data sets of the Hugging Face library, from a local folder, as there is no hub here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feddumap.config import DataConfig
from feddumap.core.rng import stream
from feddumap.data.sources import catalog
from feddumap.errors import FeddumapError

IMAGES = np.random.default_rng(0).integers(0, 256, (10, 8, 6), dtype=np.uint8)
LABELS = [i % 2 for i in range(10)]
pytestmark = pytest.mark.extras
ORDER = stream(0, "data", "order").permutation(10)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDUMAP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def hf(tmp_path: Path) -> Any:
    return pytest.importorskip("datasets", reason="the package datasets is not installed (extra hub)")


def get(path: Path | str, **keys: Any) -> Any:
    return catalog.get(DataConfig(name=f"hub:{path}", **keys))


def features(hf: Any, **more: Any) -> Any:
    return hf.Features({**more, "label": hf.ClassLabel(names=["ant", "bee"])})


def test_saved_images_with_splits(hf: Any, tmp_path: Path) -> None:
    kinds = features(hf, image=hf.Image(), who=hf.Value("string"))
    rows = {"image": [Image.fromarray(image) for image in IMAGES], "who": ["u", "v"] * 5, "label": LABELS}
    whole = hf.Dataset.from_dict(rows, features=kinds)
    hf.DatasetDict(train=whole, test=whole.select(range(4))).save_to_disk(str(tmp_path / "saved"))
    found = get(tmp_path / "saved", user="who", input="image")
    assert found.input.describe() == "image 1×8×6"
    assert np.array_equal(found.train_inputs[..., 0], IMAGES[ORDER])
    assert np.array_equal(found.test_inputs[..., 0], IMAGES[:4])
    assert (found.classes, found.users) == (("ant", "bee"), ("u", "v"))
    assert found.source == f"the Hugging Face data set {tmp_path / 'saved'}"
    assert get(tmp_path / "saved", input="image", size=4).input.shape == (1, 4, 4)


def test_one_split_of_text_in_another_order(hf: Any, tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(10)]
    whole = hf.Dataset.from_dict(
        {"text": texts, "label": LABELS}, features=features(hf, text=hf.Value("string"))
    )
    whole.select([9, 8, 7, 6, 5, 4, 3, 2]).save_to_disk(str(tmp_path / "saved"))
    found = get(tmp_path / "saved", length=8, test_fraction=0.25)
    assert found.input.describe() == "tokens 8 of 257"
    both = np.concatenate([found.train_inputs, found.test_inputs])
    read = {bytes((row[row > 0] - 1).tolist()).decode() for row in both}
    assert read == set(texts[2:])
    assert len(found.test_labels) == 2


def test_arrays_and_a_folder_of_files(hf: Any, tmp_path: Path) -> None:
    cubes = np.random.default_rng(0).normal(size=(10, 2, 3)).astype(np.float32)
    kinds = features(hf, x=hf.Array2D((2, 3), "float32"))
    made = hf.Dataset.from_dict({"x": list(cubes), "label": LABELS}, features=kinds)
    hf.DatasetDict(train=made, test=made).save_to_disk(str(tmp_path / "saved"))
    found = get(tmp_path / "saved")
    assert found.input.describe() == "numbers 2×3"
    assert np.array_equal(found.train_inputs, cubes[ORDER])
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.csv").write_text("a,b,label\n" + "1,2,0\n3,4,1\n" * 4)
    (tmp_path / "files" / "test.csv").write_text("a,b,label\n5,6,1\n")
    read = get(tmp_path / "files")
    assert read.input.describe() == "numbers 2"
    assert read.test_inputs.tolist() == [[5.0, 6.0]]


def test_mistakes(hf: Any, tmp_path: Path) -> None:
    made = hf.Dataset.from_dict(
        {"x": [1.0] * 10, "label": LABELS}, features=features(hf, x=hf.Value("float32"))
    )
    hf.DatasetDict(train=made, test=made).save_to_disk(str(tmp_path / "saved"))
    hf.DatasetDict(valid=made).save_to_disk(str(tmp_path / "valid"))
    missing = hf.Dataset.from_dict({"x": [1.0, None], "label": [0, -1]}, features=made.features)
    missing.save_to_disk(str(tmp_path / "holes"))
    (tmp_path / "empty").mkdir()
    for name, keys, message in (
        ("saved", {"label": "y"}, r"split train has no column y \(data.label\): it has x, label"),
        ("saved", {"test_fraction": 0.5}, "has a split test; remove the key"),
        ("saved", {"test": "x"}, "data.test = 'x': .* has splits"),
        ("valid", {}, "has the splits valid: expected train"),
        ("holes", {}, "split train: row 2 of the column x is empty"),
        ("empty", {}, "cannot be loaded"),
    ):
        with pytest.raises(FeddumapError, match=message) as caught:
            get(tmp_path / name, **keys)
        assert "\n" not in str(caught.value)
    with pytest.raises(FeddumapError, match="the data set hub:no/such-name cannot be loaded"):
        get("no/such-name")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FeddumapError, match=r"needs the package datasets.*pip install 'feddumap\[hub\]'"):
        get("mnist")
