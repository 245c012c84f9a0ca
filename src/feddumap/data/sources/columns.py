"""One column of a table: its values as arrays, without missing ones."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from feddumap.data.sources.memory import require_memory
from feddumap.errors import FeddumapError

Values = npt.NDArray[Any]
LONGEST_LABEL = 1_000  # characters
LARGEST_IMAGE = 256 << 20  # bytes of an encoded image

Form = Literal["image", "text", "list", "number", "other"]


@dataclass(frozen=True)
class Column:
    """A column as a pyarrow array; `title` names it in errors, in which rows count from 1."""

    array: Any
    name: str
    origin: str

    @staticmethod
    def of(column: Any, name: str, origin: str) -> Column:
        """A column of a table, with dictionaries and extension types as the values that they store."""
        import pyarrow as pa

        try:
            array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
            array.validate(full=True)  # such as UTF-8
        except pa.ArrowException as error:
            reason = " ".join(str(error).split())
            raise FeddumapError(
                f"{origin}: the column {name} cannot be read ({reason}): correct it"
            ) from None
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        return Column(array, name, origin)

    def __len__(self) -> int:
        return len(self.array)

    @property
    def type(self) -> str:
        return str(self.array.type)

    @property
    def title(self) -> str:
        return f"{self.origin}: the column {self.name}"

    @property
    def form(self) -> Form:
        from pyarrow import types

        kind = self.array.type
        if types.is_binary(kind) or types.is_large_binary(kind) or _has_bytes(kind):
            return "image"
        if _is_text(kind):
            return "text"
        if _is_list(kind):
            return "list"
        return "number" if _is_number(kind) else "other"

    def labels(self) -> Values:
        """Integers, or strings."""
        from pyarrow import types

        kind = self.array.type
        if types.is_boolean(kind):
            return np.asarray(self._whole().to_numpy(zero_copy_only=False), np.int64)
        if types.is_integer(kind):
            return np.asarray(self._whole().to_numpy(zero_copy_only=False))
        if _is_text(kind):
            self._check_length_of_labels()
            return np.array(self._whole().to_pylist())
        raise FeddumapError(f"{self.title} (the label) is {kind}: expected integers or strings")

    def _check_length_of_labels(self) -> None:
        """An array of text needs as much memory for each of its values as for the longest."""
        import pyarrow.compute as pc

        lengths = pc.utf8_length(self.array).fill_null(0).to_numpy(zero_copy_only=False)
        if len(lengths) and lengths.max() > LONGEST_LABEL:
            row = int(lengths.argmax())
            raise self._error(
                row, f"has {lengths[row]:,} characters: expected a label of at most {LONGEST_LABEL:,}"
            )

    def users(self) -> Values:
        """Strings or integers, or None for nobody."""
        from pyarrow import types

        if not (types.is_integer(self.array.type) or _is_text(self.array.type)):
            raise FeddumapError(f"{self.title} (the user) is {self.type}: expected strings or integers")
        made = np.empty(len(self), object)
        made[:] = self.array.to_pylist()
        return made

    def numbers(self) -> Values:
        import pyarrow as pa

        array = self._whole()
        if pa.types.is_decimal(array.type):
            array = array.cast(pa.float64())
        return np.asarray(array.to_numpy(zero_copy_only=False))

    def first_word(self) -> tuple[int, str] | None:
        """The first row of a text column that is no number, and its text; None if the column is no text."""
        if self.form != "text":
            return None
        return next(
            ((row, text) for row, text in enumerate(self.array.to_pylist()) if not _is_numeral(text)), None
        )

    def texts(self) -> list[str]:
        return list(self._whole().to_pylist())

    def encoded_images(self) -> list[bytes]:
        """The bytes of each image, or of the file that it names instead."""
        values = self._whole().to_pylist()
        return [
            self._bytes(row, value) if isinstance(value, dict) else value for row, value in enumerate(values)
        ]

    def _bytes(self, row: int, value: dict[str, Any]) -> bytes:
        if value.get("bytes") is not None:
            return bytes(value["bytes"])
        path = value.get("path")
        try:
            return _image_file(Path(path)) if path else b""
        except (OSError, ValueError, TypeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise self._error(row, f"names the image {path}, which cannot be read ({reason})") from None

    def lists(self, length: int | None) -> Values:
        """Lists of equal lengths, at any depth, as one array; with `length`, flat lists of integers are cut
        or padded with 0."""
        import pyarrow as pa
        import pyarrow.compute as pc

        array, shape = self._whole(), [len(self)]
        if length is not None:
            if not pa.types.is_integer(array.type.value_type):
                raise FeddumapError(
                    f"data.length = {length}: {self.title} is {self.type}, no list of integers"
                )
            require_memory(8 * len(self) * length, self.title)
            made = np.zeros((len(self), length), np.int64)
            for row, values in enumerate(array.to_pylist()):
                if None in values:
                    raise self._error(row, "has a missing value: expected integers")
                if values and max(values) >= 2**63:
                    raise self._error(row, f"has the value {max(values)}: expected less than 2**63")
                made[row, : len(values)] = values[:length]
            return made
        while _is_list(array.type):
            inner = int(np.prod(shape[1:]))
            if array.null_count:
                raise self._error(_first_null(array) // inner, "has a missing list")
            lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
            if not len(lengths) or not lengths[0]:
                raise FeddumapError(f"{self.title} has empty lists: expected numbers in each")
            if (lengths != lengths[0]).any():
                row = int((lengths != lengths[0]).argmax())
                advice = "" if len(shape) > 1 else "; pad them, or set data.length for integers"
                raise self._error(
                    row // inner,
                    f"has {lengths[row]} values, row 1 has {lengths[0]}: expected equal lengths{advice}",
                )
            shape.append(int(lengths[0]))
            array = array.flatten()
        if not _is_number(array.type):
            raise FeddumapError(f"{self.title} is {self.type}: expected lists of numbers")
        if array.null_count:
            raise self._error(_first_null(array) // int(np.prod(shape[1:])), "has a missing value")
        return np.asarray(array.to_numpy(zero_copy_only=False).reshape(shape))

    def _whole(self) -> Any:
        if self.array.null_count:
            raise self._error(_first_null(self.array), "is empty: expected a value, or remove the row")
        return self.array

    def _error(self, row: int, problem: str) -> FeddumapError:
        return FeddumapError(f"{self.origin}: row {row + 1} of the column {self.name} {problem}")


def _image_file(path: Path) -> bytes:
    """The content of a file that a table names: a regular one, of a size that images have."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_IMAGE:
        raise ValueError(f"it is no file of at most {LARGEST_IMAGE} bytes")
    return path.read_bytes()


def _is_numeral(text: str | None) -> bool:
    try:
        float(text or "")
    except ValueError:
        return False
    return True


def _first_null(array: Any) -> int:
    return int(array.is_null().to_numpy(zero_copy_only=False).argmax())


def _has_bytes(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    )
