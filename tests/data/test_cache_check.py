"""Files of the cache that change on disk are found by the check of all bytes, and by a sample at load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from feddumap.data import blocks, cache, cache_check
from feddumap.data.dataset import Arrays, Contents
from feddumap.errors import FeddumapError


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A cached set with files of several blocks, verified once."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (300, 32, 32, 3), np.uint8)
    labels = np.arange(300) % 10
    folder = tmp_path / "data" / "own"
    arrays = Arrays(images, labels, images[:50], labels[:50])
    cache.write(folder, "own", Contents(arrays, tuple("abcdefghij"), "here"))
    cache.read(folder)
    return folder


def rot(path: Path, place: int) -> None:
    """Change a byte, not the time stamp."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def states(folder: Path) -> dict[str, str]:
    return {Path(finding.path).name: finding.state for finding in cache_check.verify(folder)}


def test_a_sound_cache(cached: Path) -> None:
    assert set(states(cached).values()) == {"ok"}
    assert states(cached) == states(cached.parent)
    assert cache_check.is_cache(cached)
    assert cache_check.is_cache(cached.parent)
    assert not cache_check.is_cache(cached.parent.parent)


def test_rot_under_an_unchanged_time_stamp(cached: Path) -> None:
    """Every load checks a sample of the blocks, and many loads check all of them."""
    file = cached / "train_inputs.npy"
    count = len(blocks.read(cached)[file.name])
    assert count == -(-file.stat().st_size // blocks.BLOCK) == 4  # so few that every load checks all of them
    rot(file, file.stat().st_size - 5)
    with pytest.raises(FeddumapError, match=r"block 3 of 4 is not as it was written: delete .* data get own"):
        cache.read(cached)
    assert states(cached)["train_inputs.npy"] == "damaged"
    finding = next(each for each in cache_check.verify(cached) if each.state == "damaged")
    assert "block 3 of 4" in finding.message
    assert "feddumap data get own" in finding.message


def test_the_sample_differs_from_load_to_load(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SAMPLE", 1)
    rot(cached / "train_inputs.npy", 300_000)
    found = 0
    for _ in range(200):
        try:
            cache.read(cached)
        except FeddumapError:
            found += 1
    assert 0 < found < 200


def test_a_cache_without_digests_of_blocks(cached: Path) -> None:
    (cached / blocks.FILE).unlink()
    assert len(cache.read(cached).train_labels) == 300
    assert states(cached)[blocks.FILE] == "recovered"
    assert set(states(cached).values()) == {"ok"}
    (cached / blocks.FILE).write_text('{"train_inputs.npy": ["0"]}')
    assert states(cached)[blocks.FILE] == "recovered"
    for text in ("[" * 2000, "[1]", '{"train_inputs.npy": 3}'):
        (cached / blocks.FILE).write_text(text)
        assert len(cache.read(cached).train_labels) == 300


def test_what_is_missing_or_left(cached: Path) -> None:
    (cached / "test_labels.npy").unlink()
    (cached / ".verified.json.12.tmp").write_text("")
    other = cached.parent / "other"
    shutil.copytree(cached, other)
    (other / "manifest.json").write_text("[" * 2000)
    (cached.parent / ".own.abcdefgh").mkdir()
    found = {finding.path: finding for finding in cache_check.verify(cached.parent)}
    assert found[str(cached / "test_labels.npy")].state == "damaged"
    assert "cannot be read" in found[str(cached / "test_labels.npy")].message
    assert found[str(cached / ".verified.json.12.tmp")].state == "leftover"
    assert found[str(other / "manifest.json")].state == "damaged"
    assert found[str(cached.parent / ".own.abcdefgh")].state == "leftover"


def test_no_cache(tmp_path: Path) -> None:
    with pytest.raises(FeddumapError, match="is not a data cache"):
        cache_check.verify(tmp_path)
