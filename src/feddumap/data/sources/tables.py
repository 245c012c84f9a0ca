"""Reads samples from the columns of a table: Parquet, CSV, or a data set of the Hugging Face library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddumap.config import DataConfig
from feddumap.data.dataset import Contents
from feddumap.data.sources import parquet
from feddumap.data.sources.columns import Column
from feddumap.data.sources.images import Picture, decode, side_lengths
from feddumap.data.sources.inputs import BYTES_OF_TEXT, Stored, text_tokens, to_stored
from feddumap.data.sources.memory import require_memory
from feddumap.data.sources.rows import Rows, contents
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Say

ENDINGS = (".parquet", ".csv")
LABEL, LENGTH = "label", 256


def from_table(path: Path, data: DataConfig, say: Say) -> Contents:
    """The data set of a file, and of the file `data.test` if given."""
    train = rows(read_table(path, data), data, str(path), say, stored=path.stat().st_size)
    test = None
    if data.test is not None:
        other = Path(data.test).expanduser()
        second, channels = read_table(other, data), colour_channels(train.stored)
        test = rows(second, data, data.test, say, channels=channels, stored=other.stat().st_size)
    return contents(train, test, data, f"the file {path}")


def colour_channels(train: Stored) -> int | None:
    """The channels that a test part must have: grey images become RGB if those of the training part are."""
    return 3 if train.kind == "image" and train.inputs.shape[-1] == 3 else None


def read_table(path: Path, data: DataConfig) -> Any:
    """The needed columns of a Parquet or CSV file."""
    if path.suffix not in ENDINGS:
        raise FeddumapError(f"{path} is neither a .parquet nor a .csv file: expected one of them")
    if path.suffix == ".csv":
        return _read_csv(path)
    return parquet.table(path, lambda schema: needed(schema.names, data, str(path)), "correct it")


def _read_csv(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.csv

    one_thread = pyarrow.csv.ReadOptions(use_threads=False)  # errors then name the row
    try:
        with path.open("rb") as file:
            count = file.readline(one_thread.block_size).count(b",") + 1
        if count > parquet.MOST_COLUMNS:
            raise FeddumapError(f"{path} has {count:,} columns: expected at most {parquet.MOST_COLUMNS:,}")
        require_memory(path.stat().st_size, str(path))
        return _text_only(pyarrow.csv.read_csv(path, read_options=one_thread), str(path))
    except OSError as error:
        raise FeddumapError(f"cannot read the data set {path}: {error.strerror or error}") from None
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the latter in the names of columns
        reason = " ".join(str(error).split())
        raise FeddumapError(f"{path} is not a readable CSV file ({reason}): correct it") from None


def _text_only(table: Any, origin: str) -> Any:
    """Refuse columns of a CSV file that are not UTF-8, which arrive as bytes."""
    from pyarrow import types

    _ = table.column_names  # decoded here
    for field in table.schema:
        if not types.is_binary(field.type):
            continue
        for row, value in enumerate(table.column(field.name).to_pylist()):
            try:
                value.decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"row {row + 1} of the column {field.name}"
                raise FeddumapError(f"{origin}: {place} is not UTF-8 ({error.reason}): correct it") from None
    return table


def needed(names: Sequence[str], data: DataConfig, origin: str) -> list[str]:
    """The input's columns, then the label's and, if set, the user's; an error if one is missing."""
    label = data.label or LABEL
    others = [label] if data.user is None else [label, data.user]
    chosen = [data.input] if isinstance(data.input, str) else data.input
    inputs = chosen if chosen is not None else [name for name in names if name not in others]
    for name in (*inputs, *others):
        if name not in names:
            key = "data.label" if name == label else "data.user" if name == data.user else "data.input"
            raise FeddumapError(f"{origin} has no column {name} ({key}): it has {', '.join(names)}")
    if not inputs:
        raise FeddumapError(f"{origin} has no column for the input: it has {', '.join(names)}")
    return [*inputs, *others]


def rows(
    table: Any,
    data: DataConfig,
    origin: str,
    say: Say,
    classes: tuple[str, ...] | None = None,
    channels: int | None = None,
    stored: int | None = None,
) -> Rows:
    """The rows of a table, counted from 1 in errors; images have `channels`, or 1 if all are grey, else 3.
    `stored` are the bytes of its file, if it is one."""
    names = needed(table.column_names, data, origin)
    count = 1 if data.user is None else 2
    if not table.num_rows:
        raise FeddumapError(f"{origin} has no rows: expected an input and a label in each")

    def where(row: int) -> str:
        return f"{origin}: row {row + 1}"

    def column(name: str) -> Column:
        return Column.of(table.column(name), name, origin)

    inputs = [column(name) for name in names[:-count]]
    users = column(names[-1]).users() if data.user is not None else None
    labels = column(names[-count]).labels()
    return Rows(_inputs(inputs, data, origin, say, channels, stored), labels, users, origin, where, classes)


def _inputs(
    found: Sequence[Column],
    data: DataConfig,
    origin: str,
    say: Say,
    channels: int | None,
    stored: int | None,
) -> Stored:
    def where(row: int) -> str:
        return f"{origin}: row {row + 1}"

    first = found[0]
    if len(found) == 1 and first.form == "image":
        pictures = [Picture(where(row), raw) for row, raw in enumerate(first.encoded_images())]
        images = decode(pictures, side_lengths(data.size), say, origin, channels)
        return to_stored(images, data.kind, origin, where)
    if data.size is not None:
        raise FeddumapError(f"data.size = {data.size}: {origin} has no images; remove it")
    if len(found) == 1 and first.form == "text":
        length = data.length or LENGTH
        require_memory(8 * length * len(first), first.title, stored, "set data.length to a smaller number")
        tokens, cut = text_tokens(first.texts(), length)
        if cut:
            say(f"{origin}: {cut} of {len(tokens)} texts are longer than {length} bytes (data.length): cut")
        return Stored("tokens", tokens, BYTES_OF_TEXT)
    if len(found) == 1 and first.form == "list":
        return to_stored(first.lists(data.length), data.kind, first.title, where)
    if data.length is not None:
        raise FeddumapError(f"data.length = {data.length}: {origin} has no sequences; remove it")
    for each in found:
        if each.form != "number":
            word = each.first_word()
            problem = f"is {each.type}" if word is None else f"has {word[1]!r} in row {word[0] + 1}"
            raise FeddumapError(
                f"{each.title} {problem}: expected numbers; name the columns to use in data.input"
            )
    return to_stored(_stacked(found, data), data.kind or "numbers", origin, where)


def _stacked(found: Sequence[Column], data: DataConfig) -> npt.NDArray[Any]:
    require_memory(8 * len(found) * len(found[0]), found[0].title)
    parts = [each.numbers() for each in found]
    return np.stack(parts, axis=1) if data.kind == "tokens" else np.stack(parts, axis=1).astype(np.float64)
