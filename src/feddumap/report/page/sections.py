"""The sections of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from feddumap.report import charts as plots
from feddumap.report import label_mixes, prunings
from feddumap.report.charts import Chart, file_name, numbered
from feddumap.report.comparison import document
from feddumap.report.label_mixes import LabelMixes, MissingLabelMixes
from feddumap.report.lines import MAX_POINTS, Line, lines
from feddumap.report.notes import notes
from feddumap.report.page import parts
from feddumap.report.prunings import SeriesPruning
from feddumap.report.series import RecordedRun, Series, group_runs
from feddumap.report.statistics import Comparison, compare
from feddumap.system.console import plural

FAINT = 6  # with at most so many series, raw curves are drawn faintly behind smoothed ones
FINISHED = "Lines are means over seeds; bands show the range."
IN_TRAINING = (
    "Lines are means over the finished seeds, or over all seeds if none is finished; bands show the range; "
    "unfinished seeds are thin lines."
)


@dataclass(frozen=True)
class Content:
    """The content of a page."""

    title: str
    series: Sequence[Series]
    lines: Sequence[Line]
    compared: Comparison
    charts: Sequence[Chart]
    pruned: Sequence[Sequence[SeriesPruning]]
    mixes: Sequence[LabelMixes | MissingLabelMixes]

    @property
    def runs(self) -> list[RecordedRun]:
        return [run for each in self.series for run in each.runs]


def content(title: str, runs: Sequence[RecordedRun]) -> Content:
    """The content of the page about these runs."""
    found = group_runs(runs)
    drawn = lines(found)
    pruned = prunings.groups(prunings.prunings(found))
    return Content(
        title, found, drawn, compare(found), plots.charts(drawn), pruned, label_mixes.label_mixes(runs)
    )


def lead(value: Content) -> str:
    runs = value.runs
    models = sorted({run.config.model.name for run in runs})
    data = sorted({Path(run.config.data.name).name for run in runs})
    seeds = len({run.seed for run in runs})
    counts = [plural(len(value.series), "series"), plural(len(runs), "run"), plural(seeds, "seed")]
    return " · ".join([*(counts if len(runs) > 1 else [value.series[0].label]), some(models), some(data)])


def some(names: Sequence[str], shown: int = 4) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def sections(value: Content) -> list[tuple[str, str, str]]:
    """Key, title and HTML of each section that is not empty."""
    several = any(len(each.runs) > 1 for each in value.series)
    charts = {chart.name: (chart.title, _chart(chart, several, value)) for chart in value.charts}
    shown = document(value.compared, notes(value.series, value.compared))
    tables = parts.comparison(shown, value.lines)
    found = [
        ("accuracy", *charts["accuracy"]),
        ("comparison", "Comparison" if len(value.lines) > 1 else "Results", tables),
    ]
    if "server" in charts:
        found.append(("server", *charts["server"]))
    found.append(("cost", *charts["cost"]))
    if value.pruned:
        found.append(("pruning", "Pruning", _pruned(value)))
    if screened := parts.screened(value.series, value.lines):
        found.append(("defence", "Left out by the defence", screened))
    found.append(("labels", "Label distribution", _mixes(value)))
    found.append(("runs", "Runs", parts.runs(value.series, value.lines)))
    return found


def _chart(chart: Chart, several: bool, value: Content) -> str:
    going = any(not run.finished for run in value.runs)
    alone = any(len(each.runs) == 1 for each in value.series)
    few = (
        "the raw curve is faint"
        if len(value.lines) == 1
        else f"with up to {FAINT} series, raw curves are faint"
    )
    said = {
        "accuracy": "On the test data. Smoothed curves are Savitzky-Golay, window 39, order 3 (shorter for "
        f"short runs){f'; {few}' if alone else ''}.",
        "server": "The server update: an effective τ_eff = α τ of the server's τ local steps.",
        "cost": "Per round, not cumulative. Virtual time simulates real devices; wall time is measured here.",
    }[chart.name]
    caption = [said, *([IN_TRAINING if going else FINISHED] if several else [])]
    if any(len(run.records) > MAX_POINTS for run in value.runs):
        caption.append(f"Longer runs are thinned to {MAX_POINTS:,} evenly spaced rounds.")
    alternative = f"{chart.title} by series; the comparison tables contain the numbers."
    place = parts.figure(chart.name, alternative, " ".join(caption), file_name(chart, chart.x[0], chart.y[0]))
    return parts.controls(chart, several) + place


def _pruned(value: Content) -> str:
    shown = []
    for number, group in enumerate(value.pruned):
        name = numbered("pruning", number, len(value.pruned))
        caption = f"Share of the {group[0].what} removed from each layer of {escape(group[0].model)}"
        caption += ", the mean over seeds." if any(len(each.seeds) > 1 for each in group) else "."
        shown.append(parts.figure(f"pruning-{number}", caption, caption, name))
        shown += [parts.pruning(pruned, value.lines[pruned.place]) for pruned in group]
    return "".join(shown)


def _mixes(value: Content) -> str:
    shown, number, total = [], 0, sum(isinstance(mix, LabelMixes) for mix in value.mixes)
    for mix in value.mixes:
        heading = f"<h3>{escape(mix.title)}</h3>" if len(value.mixes) > 1 else ""
        if isinstance(mix, MissingLabelMixes):
            shown.append(
                f'{heading}<p class="missing">Label distribution unavailable: {escape(mix.reason)}.</p>'
            )
            continue
        name = numbered("labels", number, total)
        alternative = f"Label mixes of the devices of {mix.title}."
        shown.append(heading + parts.figure(f"labels-{number}", alternative, escape(_about(mix)), name))
        number += 1
    return "".join(shown)


def _about(mix: LabelMixes) -> str:
    """The caption of a heat map."""
    few = len(mix.devices) < mix.total
    said = [f"{len(mix.devices)} of {mix.total:,} devices, evenly spaced." if few else "All devices."]
    said.append(
        "Degrees are base-2 Jensen-Shannon divergences from the label mix of all devices, from 0 to 1: "
        f"mean {mix.mean_degree:.3f} over devices"
        + ("." if mix.server_degree is None else f", {mix.server_degree:.3f} for the server.")
    )
    first, *others = mix.seeds
    if others:
        listed = some([str(seed) for seed in others])
        said.append(f"Seed {first} is shown; seeds {listed} have the same partition settings.")
    return " ".join(said)
