"""A sample of what `make fuzz` tries: inputs near valid ones, and values that broke parsers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from feddumap.errors import FeddumapError, escape_controls
from tests.fuzz.mutations import inputs
from tests.fuzz.targets import TARGETS

COUNT = 30


@pytest.mark.parametrize("name", TARGETS)
def test_a_sample(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.targets.WORK", tmp_path)
    target, seeds = TARGETS[name]
    everything = inputs(seeds, 1)
    known = list(islice(everything, 400))
    for data in [*seeds, *known[len(seeds) :: 400 // COUNT], *islice(everything, COUNT)]:
        said = ""
        try:
            target(data)
        except FeddumapError as error:
            said = str(error)
        assert escape_controls(said) == said
