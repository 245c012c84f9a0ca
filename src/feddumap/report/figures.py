"""Static figures for a paper: one column wide, in the colours of the page, as PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from feddumap.report.charts import Axis, Chart, file_name, numbered
from feddumap.report.label_mixes import LabelMixes
from feddumap.report.lines import COLOURS, INK, Line, Values, evenly_spaced
from feddumap.report.prunings import SeriesPruning, layers

WIDTH, HEIGHT = 3.35, 2.3  # inches; the height is without the legend
DPI = 200
POINT = 1 / 72
SIZE = 7  # of text, in points
DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (4, 1.5)),
    "dot": (0, (1, 1.2)),
    "dashdot": (0, (4, 1.2, 1, 1.2)),
    "longdash": (0, (8, 2)),
}
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "x": "X",
    "triangle-down": "v",
    "cross": "P",
    "star": "*",
}
HATCHES = ("", "////", "xxxx", "....", "----")

Drawing = Callable[[], Figure]


def drawings(
    lines: Sequence[Line],
    charts: Sequence[Chart],
    pruned: Sequence[Sequence[SeriesPruning]],
    mixes: Sequence[LabelMixes],
) -> dict[str, Drawing]:
    """Functions that draw the figures, by file name."""
    found: dict[str, Drawing] = {}
    for chart in charts:
        for x in chart.x:
            for y in chart.y:
                found[file_name(chart, x, y)] = _bind(_lines, lines, chart, x, y)
    for number, group in enumerate(pruned):
        found[numbered("pruning", number, len(pruned))] = _bind(_bars, group, lines)
    for number, mix in enumerate(mixes):
        found[numbered("labels", number, len(mixes))] = _bind(_heat_map, mix)
    return found


def files(drawing: Drawing) -> tuple[bytes, bytes]:
    """A figure as PNG and SVG; equal figures give equal files."""
    with _paper():
        figure = drawing()
        FigureCanvasAgg(figure)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", dpi=DPI)
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return png.getvalue(), svg.getvalue()


def _bind(draw: Callable[..., Figure], *arguments: Any) -> Drawing:
    return lambda: draw(*arguments)


def _paper() -> AbstractContextManager[None]:
    settings: dict[Any, Any] = {
        "font.size": SIZE,
        "axes.labelsize": SIZE,
        "xtick.labelsize": SIZE - 1,
        "ytick.labelsize": SIZE - 1,
        "legend.fontsize": SIZE - 1,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.5,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "lines.linewidth": 1.0,
        "hatch.linewidth": 0.5,
        "svg.hashsalt": "feddumap",
    }
    return matplotlib.rc_context(settings)


def _lines(lines: Sequence[Line], chart: Chart, x: Axis, y: Axis) -> Figure:
    shown = [
        line for line in lines if any(value is not None for value in _of(line, chart).mean.get(y.key, ()))
    ]
    figure, axes = _figure(shown)
    for place, line in enumerate(shown):
        table = _of(line, chart)
        across, up = _floats(table.mean[x.key], x), _floats(table.mean[y.key], y)
        known = [i for i, value in enumerate(up) if value == value]  # rounds without a value are skipped
        across, up = [across[i] for i in known], [up[i] for i in known]
        colour = _colour(line)
        if y.key in table.low:
            low, high = _floats(table.low[y.key], y), _floats(table.high[y.key], y)
            axes.fill_between(
                across,
                [low[i] for i in known],
                [high[i] for i in known],
                color=colour,
                alpha=0.18,
                linewidth=0,
            )
        axes.plot(
            across,
            up,
            color=colour,
            linestyle=DASHES[line.style.dash],
            marker=MARKERS[line.style.marker],
            markersize=3,
            markeredgewidth=0,
            markevery=_marked(len(up), place),
            label=_text(line.label),
        )
    axes.set_xlabel(x.title)
    axes.set_ylabel(y.title)
    if y.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    elif chart.name == "cost":
        axes.set_ylim(bottom=0)
    if y.percent:
        _percent(axes)
    _legend(figure, axes, len(lines), shown)
    return figure


def _bars(group: Sequence[SeriesPruning], lines: Sequence[Line]) -> Figure:
    shown = [lines[pruned.place] for pruned in group]
    figure, axes = _figure(shown)
    width, names = 0.8 / len(group), layers(group)
    for number, pruned in enumerate(group):
        axes.bar(
            [names.index(name) - 0.4 + (number + 0.5) * width for name in pruned.removed],
            list(pruned.removed.values()),
            width * 0.92,
            color=_colour(lines[pruned.place]),
            hatch=HATCHES[pruned.place // len(COLOURS) % len(HATCHES)],
            edgecolor="white",
            linewidth=0,
            label=_text(pruned.label),
        )
    long = len(names) > 6 or max(map(len, names)) > 8
    axes.set_xticks(range(len(names)), list(map(_text, names)), rotation=60 if long else 0)
    axes.grid(False, axis="x")
    axes.set_ylabel(f"{group[0].what} removed")
    _percent(axes)
    _legend(figure, axes, len(lines), shown)
    return figure


def _heat_map(mix: LabelMixes) -> Figure:
    figure = Figure((WIDTH, 2.6), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3.2))
    shares, degrees = mix.shares, mix.degrees
    classes, devices = evenly_spaced(len(mix.classes), 20), evenly_spaced(len(mix.devices), 6)
    ticks, names = list(devices), [f"{mix.devices[i]:,}" for i in devices]
    if mix.server is not None:  # the first column, followed by a gap
        gap = np.full((1, len(mix.classes)), np.nan)
        shares = np.concatenate([mix.server[None], gap, shares])
        degrees = np.concatenate([[mix.server_degree, np.nan], degrees])
        ticks, names = [0, *(i + 2 for i in devices[1:])], ["server", *names[1:]]
    top.bar(range(len(degrees)), degrees, 0.9, color="#D55E00")
    top.set_ylabel("degree")
    top.set_ylim(0, 1)
    top.grid(False, axis="x")
    image = below.imshow(shares.T, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    below.grid(False)
    below.set_yticks(classes, [_text(mix.classes[i]) for i in classes])
    below.set_xticks(ticks, names)
    below.set_xlabel("device")
    bar = figure.colorbar(image, ax=[top, below], fraction=0.05, pad=0.02, format=_percents())
    bar.outline.set_linewidth(0.4)
    return figure


def _of(line: Line, chart: Chart) -> Any:
    return getattr(line, chart.table)


def _figure(shown: Sequence[Line]) -> tuple[Figure, Axes]:
    rows = -(-len(shown) // _columns(shown))
    extra = (rows * SIZE * 1.35 + 6) * POINT
    figure = Figure((WIDTH, HEIGHT + extra), layout="constrained")
    return figure, figure.subplots()


def _legend(figure: Figure, axes: Axes, series: int, shown: Sequence[Line]) -> None:
    if series > 1 and shown:
        figure.legend(
            *axes.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=_columns(shown),
            frameon=False,
            handlelength=2.4,
            columnspacing=1.2,
            labelspacing=0.25,
            borderpad=0,
        )


def _columns(shown: Sequence[Line]) -> int:
    """The number of columns of the legend that fit the longest label."""
    longest = max((len(line.label) for line in shown), default=1)
    return max(1, min(3, 60 // (longest + 5)))


def _marked(points: int, place: int) -> list[int]:
    """Indices of about six points to mark, shifted per line so that markers do not overlap.

    >>> _marked(3, 1), _marked(60, 0), _marked(60, 1)
    ([0, 1, 2], [0, 10, 20, 30, 40, 50], [3, 13, 23, 33, 43, 53])
    """
    step = max(1, points // 6)
    return list(range(3 * place * step // 10 % step, points, step))


def _floats(values: Values, axis: Axis) -> list[float]:
    return [float("nan") if value is None else value / axis.scale for value in values]


def _colour(line: Line) -> str:
    return "black" if line.style.colour == INK else line.style.colour


def _percents() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0, symbol=" %")


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(_percents())


def _text(label: str) -> str:
    """A label with dollar signs escaped, which matplotlib would read as a formula."""
    return label.replace("$", r"\$")
