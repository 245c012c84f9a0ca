"""Items of the paper's evaluation: a table or figure as a grid, with the paper's numbers and claims.

Each is a file of `items/`: a grid (see `feddumap.sweep.grid`) on top of `setting.toml`, with two more tables.
`[item]` describes it; `[paper]` has the paper's numbers and the comparisons that its text states.
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
Selector = dict[str, Any]  # section.key = value, or a list of alternatives


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PaperTable(StrictModel):
    """Rows of a table of the paper. A column is `name`, a configuration key that selects the row's runs, or
    one of `METRICS`; a time of nan means that the target was not reached."""

    columns: list[str]
    rows: list[list[str | int | float]]

    @model_validator(mode="after")
    def _fits(self) -> PaperTable:
        for column in self.columns:
            if column != "name" and "." not in column and column not in METRICS:
                raise ValueError(f"column {column!r}: expected name, section.key or one of {METRICS}")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {row}: expected {len(self.columns)} values, one per column")
        return self

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Reference(StrictModel):
    """The runs that a claim compares with, and the stated difference: "5.3%", "2.4 times"."""

    where: Selector
    says: Annotated[str, Field(pattern=r"^\d+(\.\d+)?(%| times?)$")]

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: dict[str, Any]) -> dict[str, Any]:
        where = {key: each for key, each in value.items() if key != "says"}
        return {"where": where, "says": value.get("says")}

    @property
    def value(self) -> float:
        """The stated number: 5.3 % is 0.053, 2.4 times is 2.4."""
        number = float(self.says.rstrip("% times"))
        return number / 100 if self.says.endswith("%") else number


class Claim(StrictModel):
    """A comparison that the text states: `of` some runs `over` others with the same data, model and keys of
    `alike`; the largest difference of all such pairs, or their mean. `target` defaults to the item's."""

    quote: str
    measure: ClaimMeasure
    of: Selector
    over: list[Reference]
    alike: list[str] = []
    take: Literal["largest", "mean"] = "largest"
    target: float | None = None


class Item(StrictModel):
    """A table or figure: its description, the tables of its grid, and the paper's numbers and claims.
    `targets` are the target accuracies of times, by model."""

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
        """The grid of its runs with these seeds."""
        sweeps = [{**sweep, "run.seed": list(seeds)} for sweep in self.tables["grid"]]
        return parse({**self.tables, "grid": sweeps}, self.name, sets)


def all_items() -> list[Item]:
    """All items in the paper's order, tables first."""
    found = [load(path) for path in sorted((HERE / "items").glob("*.toml"))]
    return sorted(found, key=lambda item: (item.number.startswith("Figure"), int(item.number.split()[1])))


def find_item(name: str) -> Item:
    """The item with a name; an unknown name is an error."""
    path = HERE / "items" / f"{name}.toml"
    known = sorted(each.stem for each in path.parent.glob("*.toml"))
    if name not in known:
        raise unknown("item", name, known)
    return load(path)


def load(path: Path) -> Item:
    """Read an item file."""
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
        raise FeddumapError(f"{path} is not a valid item: {'; '.join(mistakes)}") from None
    return item.model_copy(update={"notes": [*item.notes, *common]})
