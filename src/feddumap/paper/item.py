"""An item of the paper's evaluation: a table or a figure, as a grid and as what the paper says of it.

Each is a file of `items/`: a grid (see `feddumap.sweep.grid`) on top of `setting.toml`, with two more tables.
`[item]` tells what it is; `[paper]` has the paper's numbers, and the comparisons that its text states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from feddumap.config import read_toml
from feddumap.errors import FeddumapError, unknown
from feddumap.sweep.grid import Grid, parse

HERE = Path(__file__).parent
METRICS = ("accuracy", "time", "mflops")

ClaimMeasure = Literal["accuracy", "faster", "slower", "longer", "less compute", "more compute", "smaller"]
Selector = dict[str, Any]  # section.key = value, or a list of the values that will do


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PaperTable(StrictModel):
    """Rows of the paper's table. A column is `name`, a key that tells the row's runs, or one of `METRICS`;
    a time that is nan was never reached."""

    columns: list[str]
    rows: list[list[str | int | float]]

    @model_validator(mode="after")
    def _fits(self) -> PaperTable:
        for column in self.columns:
            if column != "name" and "." not in column and column not in METRICS:
                raise ValueError(f"column {column!r}: expected name, section.key or one of {METRICS}")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {row}: expected {len(self.columns)} values, one a column")
        return self

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Reference(StrictModel):
    """With what a claim compares, and by how much: "5.3%", "2.4 times"."""

    where: Selector
    says: Annotated[str, Field(pattern=r"^\d+(\.\d+)?(%| times?)$")]

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: dict[str, Any]) -> dict[str, Any]:
        where = {key: each for key, each in value.items() if key != "says"}
        return {"where": where, "says": value.get("says")}

    @property
    def value(self) -> float:
        """As a share: 5.3 % is 0.053, 2.4 times is 2.4."""
        number = float(self.says.rstrip("% times"))
        return number / 100 if self.says.endswith("%") else number


class Claim(StrictModel):
    """A comparison that the text states: `of` some runs over others that are alike in the data, the model and
    the keys of `alike`; the largest of all such pairs, or their mean. Without a `target`, the item's."""

    quote: str
    measure: ClaimMeasure
    of: Selector
    over: list[Reference]
    alike: list[str] = []
    take: Literal["largest", "mean"] = "largest"
    target: float | None = None


class Item(StrictModel):
    """A table or figure: what it is, the tables of its grid, and what the paper says. `targets` are the
    accuracies, by model, to which times are measured."""

    name: str
    number: str
    label: str
    caption: str
    shows: str
    notes: list[str] = []
    no_counterpart: list[str] = []
    targets: dict[str, float] = {}
    numbers: list[PaperTable] = []
    claims: list[Claim] = []
    tables: dict[str, Any]

    def grid(self, seeds: Sequence[int], sets: Iterable[str] = ()) -> Grid:
        """Its runs, with these seeds."""
        sweeps = [{**sweep, "run.seed": list(seeds)} for sweep in self.tables["grid"]]
        return parse({**self.tables, "grid": sweeps}, self.name, sets)


def all_items() -> list[Item]:
    """All items, tables first, in the paper's order."""
    found = [load(path) for path in sorted((HERE / "items").glob("*.toml"))]
    return sorted(found, key=lambda item: (item.number.startswith("Figure"), int(item.number.split()[1])))


def find_item(name: str) -> Item:
    """The item of that name."""
    path = HERE / "items" / f"{name}.toml"
    known = sorted(each.stem for each in path.parent.glob("*.toml"))
    if name not in known:
        raise unknown("item", name, known)
    return load(path)


def load(path: Path) -> Item:
    """Read an item's file."""
    tables, setting = read_toml(path, "item"), read_toml(HERE / "setting.toml", "setting")
    about, paper = tables.pop("item", {}), tables.pop("paper", {})
    methods = {method for sweep in tables.get("grid", []) for method in sweep.get("method.name", [])}
    common = [
        note["text"]
        for note in setting.pop("notes")
        if "methods" not in note or methods & set(note["methods"])
    ]
    for section, keys in setting.items():
        tables[section] = {**keys, **tables.get(section, {})}
    try:
        item = Item.model_validate({"name": path.stem, **about, **paper, "tables": tables})
    except ValidationError as error:
        mistakes = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise FeddumapError(f"{path} is not an item: {'; '.join(mistakes)}") from None
    return item.model_copy(update={"notes": [*item.notes, *common]})
