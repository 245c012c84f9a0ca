"""Comparing and reporting from Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from feddumap.config import Config
from feddumap.core.record import Record
from feddumap.errors import FeddumapError
from feddumap.report import notebook, statistics, tables
from feddumap.report.comparison import document
from feddumap.report.notes import notes
from feddumap.report.page import document as page
from feddumap.report.page.sections import content, some
from feddumap.report.series import RecordedRun, find_runs, group_runs
from feddumap.report.statistics import AccuracyMeasure
from feddumap.report.tables import Document
from feddumap.runs.existing import stored
from feddumap.system.callbacks import ignore

if TYPE_CHECKING:
    from pandas import DataFrame

IN_MEMORY = Path("in memory")


class OpenRun(Protocol):
    """What a comparison needs of a run of this process."""

    config: Config
    records: list[Record]
    out: Path | None

    @property
    def finished(self) -> bool: ...


Runs = Iterable["OpenRun | str | Path"]


@dataclass(frozen=True, repr=False)
class ComparedRuns(Document):
    """The tables of `feddumap compare`; a notebook shows them."""

    runs: tuple[RecordedRun, ...]

    def to_markdown(self) -> str:
        return tables.render(self, "markdown")

    def frame(self) -> DataFrame:
        """A pandas table with a row per series: the numbers of all tables, shares of 1, seconds and bytes."""
        return notebook.frame(tables.plain_rows(self), index="series")

    def report(self, out: str | Path = "report", figures: bool = True) -> Path:
        """Write the HTML page about these runs, and its figures; returns the path of the page."""
        page.require_packages(figures=figures)
        if any(each.path == IN_MEMORY for each in self.runs):
            raise FeddumapError("a report needs run directories, but a run is in memory: give it an `out`")
        title = some([each.path.name for each in self.runs], 3)
        return page.write(Path(out), content(title, self.runs), ignore, figures=figures)

    def __repr__(self) -> str:
        return tables.render(self, "table")

    def _repr_html_(self) -> str:
        return notebook.tables_html(self)


def compare(
    runs: Runs,
    targets: Sequence[float] = (),
    base: str | None = None,
    measure: AccuracyMeasure = "mean10",
) -> ComparedRuns:
    """Compare runs, given as such or by their directories: accuracy, time to targets, cost, and a
    significance test over seeds against `base`."""
    recorded = _recorded(runs)
    found = group_runs(recorded)
    value = statistics.compare(found, targets, base, measure)
    made = document(value, notes(found, value))
    return ComparedRuns(made.tables, made.notes, made.data, tuple(recorded))


def _recorded(runs: Runs) -> list[RecordedRun]:
    found: list[RecordedRun] = []
    for run in runs:
        if isinstance(run, str | Path):
            found += find_runs([Path(run)])
        elif not run.records:
            raise FeddumapError(f"{run.out or 'a run in memory'} has no finished round: train it first")
        else:
            records: list[dict[str, Any]] = [dict(record) for record in run.records]
            found.append(RecordedRun(run.out or IN_MEMORY, stored(run.config), records, run.finished))
    if not found:
        raise FeddumapError("no runs are given: expected runs, or the directories of runs")
    return found
