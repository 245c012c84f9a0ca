"""The metadata of an exported file, in every format: one JSON text under the key `feddumap`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from feddumap import __version__
from feddumap.core.messages import Architecture
from feddumap.system.json_text import parse_json

KEY = "feddumap"
INPUT, OUTPUT = "input", "logits"

PREPROCESSING = {
    "image": "bytes / 255, channels first: from 0 to 1, no other normalisation",
    "numbers": "none",
    "tokens": "none",
}


@dataclass(frozen=True)
class Metadata:
    """The architecture, the class names in the order of the outputs, and the run the model comes from.

    `batch` is the fixed batch size of the file, None for any.
    """

    architecture: Architecture
    classes: tuple[str, ...]
    run: Mapping[str, Any]
    batch: int | None = None

    def to_json(self) -> str:
        batch, given = self.batch or "batch", self.architecture.input
        value = {
            "format": 1,
            "version": __version__,
            "classes": self.classes,
            "input": {
                "name": INPUT,
                "kind": given.kind,
                "shape": [batch, *given.shape],
                "type": "int64" if given.kind == "tokens" else "float32",
                "preprocessing": PREPROCESSING[given.kind],
            },
            "output": {
                "name": OUTPUT,
                "shape": [batch, len(self.classes)],
                "type": "float32",
                "postprocessing": "softmax gives the probabilities of the classes",
            },
            "architecture": self.architecture.to_json(),
            "run": self.run,
        }
        return json.dumps(value)

    @staticmethod
    def from_json(text: str | bytes) -> Metadata:
        """Parse metadata; invalid text is a ValueError."""
        try:
            value = parse_json(text)
            if value["format"] != 1:
                raise ValueError(f"its metadata has format {value['format']!r}, expected 1")
            batch = value["input"]["shape"][0]
            return Metadata(
                Architecture.from_json(value["architecture"]),
                tuple(value["classes"]),
                value["run"],
                batch if isinstance(batch, int) else None,
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"its metadata is incomplete ({error})") from None
