"""Reads columns of a Parquet file in batches; memory is bounded by what its pages declare, and checked before
they are decompressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feddumap.data.sources import parquet_pages
from feddumap.data.sources.memory import require_memory, require_rows
from feddumap.data.sources.parquet_pages import WIDTHS, PageError
from feddumap.errors import FeddumapError

MOST_COLUMNS = 100_000
BATCH_BYTES = 64 << 20  # that a batch of cells may have; no cell is larger than its page
MOST_BATCH = 1 << 16  # rows
ADVICE = 'write it with compression="none", use_dictionary=False if it is sound'

Choose = Callable[[Any], list[str]]
"""Chooses columns, given the file's schema."""


@contextmanager
def reading(path: Path, advice: str) -> Iterator[None]:
    """Errors of pyarrow as one sentence, which ends with advice."""
    import pyarrow as pa

    try:
        yield
    except PageError as error:
        raise FeddumapError(f"{path} is not a readable Parquet file ({error}): {advice}") from None
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the latter in the names of columns
        reason = " ".join(str(error).split())
        raise FeddumapError(f"{path} is not a readable Parquet file ({reason}): {advice}") from None
    except OSError as error:
        # pyarrow also raises it for invalid files, without a number
        reason = error.strerror or f"it is not a readable Parquet file: {' '.join(str(error).split())}"
        raise FeddumapError(f"cannot read the data set {path} ({reason}): {advice}") from None


def schema(path: Path, advice: str) -> Any:
    """The schema of a file."""
    with reading(path, advice), _opened(path) as file:
        return file.schema_arrow


def batches(path: Path, choose: Choose, advice: str, most: int = MOST_BATCH) -> Iterator[Any]:
    """The chosen columns in batches of at most `most` rows; dictionaries are decoded."""
    import pyarrow as pa

    with reading(path, advice), _opened(path) as file:
        size = path.stat().st_size
        names = choose(file.schema_arrow)
        require_rows(file.metadata.num_rows, str(path), size)
        count = min(most, _batch_rows(path, file, names, size))
        done = 0
        for batch in file.iter_batches(count, columns=names, use_threads=False):
            columns = [
                column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
                for column in batch.columns
            ]
            done += sum(column.nbytes for column in columns)
            require_memory(done, str(path), size, ADVICE)
            yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def table(path: Path, choose: Choose, advice: str) -> Any:
    """The chosen columns as a table."""
    import pyarrow as pa

    found = list(batches(path, choose, advice))
    if not found:
        raise FeddumapError(f"{path} has no rows: expected an input and a label in each")
    with reading(path, advice):
        return pa.Table.from_batches(found)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        if file.metadata.num_columns > MOST_COLUMNS:
            raise FeddumapError(
                f"{path} has {file.metadata.num_columns:,} columns: expected at most {MOST_COLUMNS:,}"
            )
        yield file


def _batch_rows(path: Path, file: Any, names: Sequence[str], size: int) -> int:
    """How many rows to read at once, after checking what the pages of the columns declare."""
    leaves = {
        index: name
        for index in range(file.metadata.num_columns)
        for name in names
        if (file.schema.column(index).path + ".").startswith(f"{name}.")
    }
    total = largest = 0
    with path.open("rb") as raw:
        for index, name in leaves.items():
            leaf = file.schema.column(index)
            width = WIDTHS.get(leaf.physical_type, max(leaf.length, 0) + 4)
            cells = leaf.physical_type == "BYTE_ARRAY"
            if cells and leaf.max_repetition_level:
                kind = file.schema_arrow.field(name).type
                raise FeddumapError(f"{path}: the column {name} is {kind}: expected lists of numbers")
            for group in range(file.metadata.num_row_groups):
                for page in parquet_pages.pages(raw, file.metadata.row_group(group).column(index)):
                    total += max(page.uncompressed, page.values * width)
                    largest = max(largest, page.uncompressed if cells else 0)
                    require_memory(total, str(path), size, ADVICE)
    return max(1, min(MOST_BATCH, BATCH_BYTES // max(1, largest)))
