"""What the pages of a Parquet file declare, read from their headers before any page is decompressed.

The footer's sizes are not enough: nothing makes a page agree with them, and a page of equal values declares
a few bytes however many values it has. The headers are structs of Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
FIRST_READ, LARGEST_HEADER = 1 << 10, 1 << 24  # bytes
DEEPEST = 8  # nested structs in a header
_BOOLS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12


class Page(NamedTuple):
    """The bytes of a page after decompression, and its number of values; 0 for a dictionary."""

    uncompressed: int
    values: int


class PageError(ValueError):
    """A page header that cannot be read."""


def pages(file: BinaryIO, chunk: Any) -> Iterator[Page]:
    """The pages of a column chunk, given by its metadata."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < start:
        start = chunk.dictionary_page_offset
    end, left = start + chunk.total_compressed_size, chunk.num_values
    while start < end and left > 0:
        header, size = _header(file, start)
        uncompressed, compressed = header.get(2), header.get(3)
        if type(uncompressed) is not int or type(compressed) is not int or min(uncompressed, compressed) < 0:
            raise PageError("a page does not declare its size")
        data = header.get(5) or header.get(8)
        values = data.get(1) if isinstance(data, dict) else 0
        if type(values) is not int or values < 0:
            raise PageError("a page does not declare its number of values")
        yield Page(uncompressed, values)
        start += size + compressed
        left -= values


def _header(file: BinaryIO, start: int) -> tuple[dict[int, Any], int]:
    """The fields of the page header at a position, and its length."""
    size = FIRST_READ
    while True:
        file.seek(start)
        data = file.read(size)
        try:
            reader = _Compact(data)
            return reader.struct(0), reader.position
        except IndexError:
            if len(data) < size or size >= LARGEST_HEADER:
                raise PageError("a page header is incomplete") from None
            size *= 8


class _Compact:
    """A reader of Thrift's compact protocol; the end of the data is an IndexError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def struct(self, depth: int) -> dict[int, Any]:
        """The fields by number: integers and structs; others are skipped."""
        if depth > DEEPEST:
            raise PageError("a page header is nested too deeply")
        found: dict[int, Any] = {}
        number = 0
        while True:
            byte = self._byte()
            if byte == 0:
                return found
            number = number + (byte >> 4) if byte >> 4 else self._integer()
            found[number] = self._value(byte & 15, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _BOOLS:
            return None
        if kind == _BYTE:
            return self._byte()
        if kind in _INTEGERS:
            return self._integer()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_DOUBLE, _BINARY):
            self._skip(8 if kind == _DOUBLE else self._varint())
            return None
        if kind in _LISTS:
            self._list(depth)
            return None
        raise PageError(f"a page header has a field of type {kind}")

    def _list(self, depth: int) -> None:
        if depth > DEEPEST:
            raise PageError("a page header is nested too deeply")
        byte = self._byte()
        count = byte >> 4 if byte >> 4 < 15 else self._varint()
        for _ in range(count):
            if byte & 15 in _BOOLS:
                self._byte()
            else:
                self._value(byte & 15, depth + 1)

    def _byte(self) -> int:
        byte = self._data[self.position]
        self.position += 1
        return byte

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self._data):
            raise IndexError

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise PageError("a page header has a number of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
