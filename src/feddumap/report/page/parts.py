"""HTML parts of the page: tables, legend, controls, runs. User-provided names are escaped."""

from __future__ import annotations

import shlex
from collections.abc import Container, Mapping, Sequence
from html import escape

from feddumap.attacks import hostile_devices
from feddumap.report.charts import Axis, Chart
from feddumap.report.lines import INK, Line, Style
from feddumap.report.prunings import SeriesPruning
from feddumap.report.series import RecordedRun, Series
from feddumap.report.tables import Document, Table, TableCell
from feddumap.runs.screened import screened_devices
from feddumap.runs.summary import missing_devices
from feddumap.system.console import plural

STROKES = {"solid": "", "dash": "6 3", "dot": "1.5 2.5", "dashdot": "6 2.5 1.5 2.5", "longdash": "10 3"}
MAX_DEVICES = 50  # devices in a list
MAX_OPEN = 12  # with more series, only the first table is open
SHAPES = {
    "circle": "M14 6a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
    "square": "M14.3 3.3h5.4v5.4h-5.4z",
    "diamond": "M17 2.4l3.6 3.6l-3.6 3.6l-3.6 -3.6z",
    "triangle-up": "M17 2.6l3.6 6h-7.2z",
    "triangle-down": "M17 9.4l3.6 -6h-7.2z",
    "x": "M14 3l1.4 -1.1l1.6 2l1.6 -2l1.4 1.1l-1.7 3l1.7 3l-1.4 1.1l-1.6 -2l-1.6 2l-1.4 -1.1l1.7 -3z",
    "cross": "M16 2h2v3h3v2h-3v3h-2v-3h-3v-2h3z",
    "star": "M17 1.8l1.2 2.8l3 .3l-2.3 2l.7 3l-2.6 -1.6l-2.6 1.6l.7 -3l-2.3 -2l3 -.3z",
}


def swatch(style: Style) -> str:
    """A legend symbol: a piece of the line with its marker."""
    colour = "var(--ink)" if style.colour == INK else style.colour
    return (
        f'<svg class="swatch" viewBox="0 0 34 12" aria-hidden="true" style="color:{colour}">'
        f'<path d="M0 6h34" fill="none" stroke="currentColor" stroke-width="2" '
        f'stroke-dasharray="{STROKES[style.dash]}"/>'
        f'<path d="{SHAPES[style.marker]}" fill="currentColor"/></svg>'
    )


def legend(lines: Sequence[Line], shown: Container[int]) -> str:
    """The legend, with a checkbox for each series; those in `shown` are checked."""
    items = "".join(
        f'<li><label><input type="checkbox"{" checked" if place in shown else ""} data-line="{place}">'
        f"{swatch(line.style)}"
        f"<span>{escape(line.label)}</span></label></li>"
        for place, line in enumerate(lines)
    )
    best = '<button type="button" data-choose="best">best five</button>' if len(lines) > 8 else ""
    return (
        '<details class="legend" open><summary>Series <span id="count"></span></summary>'
        '<p class="choose"><button type="button" data-choose="all">all</button>'
        f'<button type="button" data-choose="none">none</button>{best}</p><ul>{items}</ul></details>'
    )


def controls(chart: Chart, seeds: bool) -> str:
    """The controls of a line chart."""
    curve = "curve" if chart.table == "accuracy" else "shown"
    choices = _choice(f"{chart.name}-y", curve, chart.y) + _choice(f"{chart.name}-x", "against", chart.x)
    if seeds:
        choices += (
            f'<label class="tick"><input type="checkbox" name="{chart.name}-seeds"> single seeds</label>'
        )
    return f'<div class="controls" data-chart="{chart.name}">{choices}</div>'


def _choice(name: str, legend: str, axes: Sequence[Axis]) -> str:
    if len(axes) < 2:
        return ""
    options = "".join(
        f'<label><input type="radio" name="{name}" value="{axis.key}"{" checked" if not place else ""}>'
        f"<span>{escape(axis.name)}</span></label>"
        for place, axis in enumerate(axes)
    )
    return f'<fieldset class="choice"><legend>{legend}</legend>{options}</fieldset>'


def figure(name: str, alternative: str, caption: str, file: str) -> str:
    """A placeholder for a figure, with alternative text, caption and links to its files."""
    return (
        f'<figure><div class="plot" id="plot-{name}" role="img" aria-label="{escape(alternative)}"></div>'
        f'<figcaption>{caption} <span class="files" id="files-{name}">For a paper: '
        f'<a href="figures/{file}.svg">SVG</a>, <a href="figures/{file}.png">PNG</a></span>'
        "</figcaption></figure>"
    )


def comparison(document: Document, lines: Sequence[Line]) -> str:
    """The sortable tables of a comparison, and its notes."""
    styles = {line.label: line.style for line in lines}
    few = len(lines) <= MAX_OPEN
    shown = "".join(_table(table, styles, few or not place) for place, table in enumerate(document.tables))
    notes = "".join(f"<li>{escape(note)}</li>" for note in document.notes)
    return shown + (f'<ul class="notes">{notes}</ul>' if notes else "")


def _table(table: Table, styles: Mapping[str, Style], opened: bool) -> str:
    heads = "".join(
        f'<th scope="col"{_right(column.right)}><button type="button">{escape(column.title)}</button></th>'
        for column in table.columns
    )
    rows = []
    for first, *others in table.rows():
        known = swatch(styles[first.text]) if first.text in styles else ""
        cells = "".join(
            f"<td{_right(column.right)}{_sort(cell)}>{_best(cell)}</td>"
            for column, cell in zip(table.columns[1:], others, strict=True)
        )
        rows.append(f'<tr><th scope="row">{known}<span>{escape(first.text)}</span></th>{cells}</tr>')
    title = escape(table.title)
    return (
        f"<details{' open' if opened else ''}><summary><h3>{title}</h3></summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        "</details>"
    )


def _best(cell: TableCell) -> str:
    return f"<strong>{escape(cell.text)}</strong>" if cell.best else escape(cell.text)


def _right(right: bool) -> str:
    return ' class="right"' if right else ""


def _sort(cell: TableCell) -> str:
    number = next((value for value in cell.plain.values() if isinstance(value, float | int)), None)
    return "" if number is None else f' data-sort="{number!r}"'


def pruning(pruned: SeriesPruning, line: Line) -> str:
    """A table of a series' pruning: per layer, the number kept for each seed and the share removed."""
    first = pruned.records[0]
    rounds = " or ".join(str(number) for number in sorted({each["round"] for each in pruned.records}))
    often = f"pruned {pruned.times} times, the last " if pruned.times > 1 else "pruned "
    rates = ", ".join(f"{each['rate']:.3f}" for each in pruned.records)
    heads = "".join(f'<th scope="col" class="right">kept, seed {seed}</th>' for seed in pruned.seeds)
    rows = []
    for name in first["layers"]:
        kept = [each["layers"][name]["kept"] for each in pruned.records]
        whole = first["layers"][name][pruned.what]
        cells = "".join(f'<td class="right">{number:,}</td>' for number in kept)
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="right">{whole:,}</td>{cells}'
            f'<td><meter min="0" max="1" value="{1 - sum(kept) / len(kept) / whole:.4f}"></meter> '
            f"{1 - sum(kept) / len(kept) / whole:.1%}</td></tr>"
        )
    costs = "".join(
        _fall(pruned, *pair) for pair in (("parameters", "parameters"), ("macs", "multiply-adds"))
    )
    return (
        f"<details><summary>{swatch(line.style)}<span>{escape(pruned.label)}</span></summary>"
        f"<p>{often.capitalize()}after {rounds} rounds, at the rate {rates}. {costs}</p>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Layers of {escape(pruned.label)}">'
        f'<table><thead><tr><th scope="col">layer</th><th scope="col" class="right">{pruned.what}</th>{heads}'
        f'<th scope="col">removed</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div></details>'
    )


def _fall(pruned: SeriesPruning, key: str, name: str) -> str:
    before, after = (
        sum(each[key][when] for each in pruned.records) / len(pruned.records) for when in ("before", "after")
    )
    return f"{name.capitalize()}: {before:,.0f} before, {after:,.0f} after ({after / before - 1:+.1%}). "


def screened(series: Sequence[Series], lines: Sequence[Line]) -> str:
    """For each run whose defence left out or clipped uploads, a table of their devices; empty if none did."""
    pairs = zip(series, lines, strict=True)
    return "".join(_screened(each.label, run, line.style) for each, line in pairs for run in each.runs)


def _screened(label: str, run: RecordedRun, style: Style) -> str:
    found = screened_devices(run.records, hostile_devices(run.config))
    if not found:
        return ""
    attacked = run.config.attack.name != "none"
    heads = ["device", "uploads", "left out", "clipped", *(["hostile"] if attacked else []), "reason"]
    rows = []
    for each in found[:MAX_DEVICES]:
        numbers = "".join(
            f'<td class="right">{n:,}</td>' for n in (each.uploads, each.left_out, each.clipped)
        )
        known = f"<td>{'yes' if each.hostile else 'no'}</td>" if attacked else ""
        rows.append(
            f'<tr><th scope="row">{each.device}</th>{numbers}{known}<td>{escape(each.reason)}</td></tr>'
        )
    more = f"<p>{MAX_DEVICES} of {len(found):,} devices.</p>" if len(found) > MAX_DEVICES else ""
    title = f"{escape(label)} · seed {run.seed} · {escape(run.config.aggregate.name)}"
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return (
        f"<details><summary>{swatch(style)}<span>{title}</span></summary>{more}"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Devices left out of {title}">'
        f"<table><thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def unfinished_runs(series: Sequence[Series]) -> str:
    """A list of the unfinished runs, if any."""
    found = [
        f"<li>{escape(each.label)}, seed {run.seed}: in training, {len(run.records):,} of "
        f"{run.config.train.rounds:,} rounds</li>"
        for each in series
        for run in each.runs
        if not run.finished
    ]
    return f'<ul class="going">{"".join(found)}</ul>' if found else ""


def runs(series: Sequence[Series], lines: Sequence[Line]) -> str:
    """The directory, command and configuration of each run, and how to repeat it."""
    pairs = zip(series, lines, strict=True)
    return "".join(_run(each.label, run, line.style) for each, line in pairs for run in each.runs)


def _run(label: str, run: RecordedRun, style: Style) -> str:
    done, total = len(run.records), run.config.train.rounds
    state = plural(done, "round") if run.finished else f"in training, {done:,} of {total:,} rounds"
    file = run.path / "command.txt"
    made = ""
    if file.is_file():
        command = file.read_text(encoding="utf-8", errors="replace").strip()
        made = f"<dt>Command</dt><dd><code>{escape(command)}</code></dd>"
    repeat = f"feddumap train {shlex.quote(str(run.path / 'config.toml'))} --out NEW"
    config = (run.path / "config.toml").read_text(encoding="utf-8")
    return (
        f"<details><summary>{swatch(style)}<span>{escape(label)} · seed {run.seed} · {state}</span></summary>"
        f"<dl><dt>Directory</dt><dd><code>{escape(str(run.path))}</code></dd>{made}"
        f"<dt>To repeat it</dt><dd><code>{escape(repeat)}</code></dd>{_missing(run)}</dl>"
        f'<pre tabindex="0" aria-label="Configuration of {escape(label)}, seed {run.seed}">'
        f"{escape(config)}</pre></details>"
    )


def _missing(run: RecordedRun) -> str:
    """The devices that were lost or refused, and why."""
    found = missing_devices(run.records)
    if not found:
        return ""
    items = "".join(
        f"<li>device {device}, {plural(rounds, 'round')}, last in round {last}: {escape(reason)}</li>"
        for device, rounds, last, reason in found[:MAX_DEVICES]
    )
    more = f"<li>and {len(found) - MAX_DEVICES} more</li>" if len(found) > MAX_DEVICES else ""
    return f"<dt>Missing devices</dt><dd><ul>{items}{more}</ul></dd>"
