"""Files that claim or become far more than their size are refused with a sentence, in little memory."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feddumap.config import DataConfig
from feddumap.data.sources import catalog, cifar, memory, parquet_pages
from feddumap.errors import FeddumapError

READ = """
import resource, sys
from feddumap.config import DataConfig
from feddumap.data.sources import catalog, formats, memory, tables, images, npz, folder
import pyarrow.csv, pyarrow.parquet, PIL.Image, PIL.PngImagePlugin
from feddumap.errors import FeddumapError
memory.ALWAYS = 16 << 20  # for files that are made quickly; the limit is otherwise 256 MB
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        catalog.get(DataConfig(name=path))
        said = "it was read"
    except FeddumapError as error:
        said = str(error)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print((after - before) // 1024, said, sep="\\t", flush=True)
"""
MOST_MB = 100  # that reading any of these files may take


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDUMAP_HOME", str(tmp_path / "home"))


def zeros(path: Path, **arrays: tuple[str, tuple[int, ...]]) -> None:
    """An .npz file of zeros, written in pieces."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (dtype, shape) in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_2_0(file, header)
                left = int(np.prod(shape)) * np.dtype(dtype).itemsize
                while left:
                    left -= file.write(bytes(min(left, 1 << 22)))


def deflated_npz(folder: Path) -> Path:
    """64 MB of zeros in 64 KB."""
    path = folder / "zeros.npz"
    zeros(
        path,
        train_inputs=("<f4", (1 << 14, 1 << 10)),
        train_labels=("<i8", (1 << 14,)),
        test_inputs=("<f4", (2, 1 << 10)),
        test_labels=("<i8", (2,)),
    )
    return path


def lying_npz(folder: Path) -> Path:
    """A header that declares more than the archive's directory."""
    path = folder / "lying.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("train_inputs", "train_labels", "test_inputs", "test_labels"):
            raw = io.BytesIO()
            header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 33,)}
            np.lib.format.write_array_header_2_0(raw, header)
            archive.writestr(f"{name}.npy", raw.getvalue() + bytes(64))
    return path


def one_cell(folder: Path) -> Path:
    """A cell of 120 MB in a few KB."""
    path = folder / "cell.parquet"
    table = pa.table({"x": pa.array([bytes(120 << 20), b"a"]), "label": [0, 1]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    return path


def repeated_cell(folder: Path) -> Path:
    """A dictionary of one cell of a megabyte, and 2,000 rows that refer to it."""
    path = folder / "repeated.parquet"
    cells = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000, pa.int32()), pa.array(["a" * (1 << 20)]))
    pq.write_table(pa.table({"x": cells, "label": [0, 1] * 1_000}), path, compression="zstd")
    return path


def long_list(folder: Path) -> Path:
    """A list of 16 million equal numbers in two rows."""
    path = folder / "list.parquet"
    values = pa.array(np.zeros(16_000_000, np.int64))
    table = pa.table({"x": pa.ListArray.from_arrays([0, 8_000_000, 16_000_000], values), "label": [0, 1]})
    pq.write_table(table, path, compression="zstd", write_statistics=False, data_page_size=1 << 30)
    return path


def many_rows(folder: Path) -> Path:
    """A million rows of the same image in a few KB."""
    raw = io.BytesIO()
    Image.new("L", (1, 1)).save(raw, "PNG")
    path = folder / "rows.parquet"
    images = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(1_000_000, np.int32)), pa.array([raw.getvalue()])
    )
    table = pa.table({"x": images, "label": np.zeros(1_000_000, np.int64)})
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 15_000
    return path


def large_image(folder: Path) -> Path:
    """A PNG of 25 million pixels in a few KB."""
    width, height = 5_000, 5_000
    line = zlib.compressobj(9)
    packed = b"".join(line.compress(bytes(1 + width)) for _ in range(height)) + line.flush()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    raw = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    root = folder / "pictures"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        (root / name / "1.png").write_bytes(raw)
    return root


def wide_csv(folder: Path) -> Path:
    path = folder / "wide.csv"
    path.write_text("," * 500_000 + "\n")
    return path


def long_label(folder: Path) -> Path:
    path = folder / "label.csv"
    path.write_text("x,label\n1," + "a" * 500_000 + "\n" + "1,b\n" * 20_000)
    return path


FILES: dict[Callable[[Path], Path], str] = {
    deflated_npz: "declares 67.2 MB of data in",
    lying_npz: "declares float32 (8589934592,) in 64 bytes",
    one_cell: "MB of data in",
    repeated_cell: "of data in",
    long_list: "of data in",
    many_rows: "declares 1,000,000 rows in",
    large_image: "declares 100.0 MB of data in",
    wide_csv: "500,001 columns: expected at most 100,000",
    long_label: "row 1 of the column label has 500,000 characters",
}


@pytest.mark.slow
def test_refused_in_little_memory(tmp_path: Path) -> None:
    paths = [make(tmp_path) for make in FILES]
    found = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    lines = [line.split("\t") for line in found.stdout.splitlines()]
    assert len(lines) == len(paths), found.stderr
    for path, expected, (used, said) in zip(paths, FILES.values(), lines, strict=True):
        assert expected in said, said
        assert path.name in said
        assert int(used) < MOST_MB, (path.name, used, said)


def test_a_file_that_says_what_it_holds_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers without compression: the limit is on what a file becomes, not on its size."""
    monkeypatch.setattr(memory, "ALWAYS", 1 << 10)
    rows = {"train_inputs": np.zeros((400, 50)), "train_labels": np.arange(400) % 2}
    np.savez_compressed(tmp_path / "small.npz", **rows)
    np.savez(tmp_path / "whole.npz", **rows)
    data = DataConfig(name=str(tmp_path / "small.npz"), test_fraction=0.5)
    with pytest.raises(FeddumapError, match=r"more than 100 times .*: save it with numpy\.savez"):
        catalog.get(data)
    assert len(catalog.get(data.model_copy(update={"name": str(tmp_path / "whole.npz")})).train_labels) == 200
    table = pa.table({"x": np.zeros(4000), "y": np.arange(4000.0), "label": np.arange(4000) % 2})
    pq.write_table(table, tmp_path / "own.parquet")
    assert len(catalog.get(str(tmp_path / "own.parquet")).train_labels) == 3200


@pytest.mark.slow
def test_a_large_honest_set_is_read(tmp_path: Path) -> None:
    """A gigabyte of random images."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (340_000, 32, 32, 3), np.uint8)
    labels = np.arange(340_000) % 10
    few = {"test_inputs": images[:100], "test_labels": labels[:100]}
    np.savez(tmp_path / "large.npz", train_inputs=images, train_labels=labels, **few)
    assert (tmp_path / "large.npz").stat().st_size > 1e9
    assert len(catalog.get(str(tmp_path / "large.npz")).train_labels) == 340_000


def test_pages_are_read_as_pyarrow_wrote_them(tmp_path: Path) -> None:
    """The number of values and the sizes that page headers declare add up to those of the footer."""
    rng = np.random.default_rng(1)
    table = pa.table(
        {
            "number": rng.normal(size=30_000),
            "text": [f"text {value}" for value in rng.integers(0, 1000, 30_000)],
            "list": [[1, 2, 3]] * 30_000,
        }
    )
    for version in ("1.0", "2.0"):
        for compression in ("none", "zstd"):
            path = tmp_path / "own.parquet"
            pq.write_table(
                table,
                path,
                data_page_version=version,
                compression=compression,
                row_group_size=7_000,
                data_page_size=4_000,
            )
            metadata = pq.ParquetFile(path).metadata
            with path.open("rb") as file:
                for group in range(metadata.num_row_groups):
                    for index in range(metadata.num_columns):
                        chunk = metadata.row_group(group).column(index)
                        found = list(parquet_pages.pages(file, chunk))
                        assert sum(page.values for page in found) == chunk.num_values
                        headers = chunk.total_uncompressed_size - sum(page.uncompressed for page in found)
                        assert 0 < headers <= 200 * len(found)


@pytest.mark.parametrize("data", [b"", b"\x15", b"\xff" * 40, b"\x1c" * 60, b"\x19\xf8" + b"\xff" * 9])
def test_a_damaged_page_header(data: bytes) -> None:
    class Chunk:
        data_page_offset, total_compressed_size, num_values = 0, 100, 10
        has_dictionary_page, dictionary_page_offset = False, None

    with pytest.raises(parquet_pages.PageError):
        list(parquet_pages.pages(io.BytesIO(data), Chunk))


def test_a_table_names_no_device_or_pipe(tmp_path: Path) -> None:
    """An image column may name files: neither an endless one nor one that blocks is read."""
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("/dev/zero", str(tmp_path / "pipe.png"), "a\0b"):
        table = pa.table({"image": [{"bytes": None, "path": name}] * 4, "label": [0, 1, 0, 1]})
        pq.write_table(table, tmp_path / "own.parquet")
        with pytest.raises(
            FeddumapError, match=r"row 1 of the column image names the image .* cannot be read"
        ):
            catalog.get(str(tmp_path / "own.parquet"))


def test_a_folder_with_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "own" / "a").mkdir(parents=True)
    os.mkfifo(tmp_path / "own" / "a" / "1.png")
    with pytest.raises(FeddumapError, match="has no images"):
        catalog.get(str(tmp_path / "own"))


def test_an_archive_that_grows(tmp_path: Path) -> None:
    """A header that declares 2 GB, of which the archive has 8 MB, is not read to its end."""
    path = tmp_path / "own.tar.gz"
    name = tarfile.TarInfo("header")
    name.type, name.size = tarfile.XHDTYPE, 2 << 30
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(name.tobuf() + bytes(8 << 20))
    with pytest.raises(FeddumapError, match="more than twice the expected size"):
        cifar.read_members(path, {"batch": 1000})
