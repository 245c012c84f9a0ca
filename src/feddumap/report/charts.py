"""Chart definitions: axes, and the data that the page's script passes to plotly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from feddumap.report.label_mixes import LabelMixes
from feddumap.report.lines import COLOURS, Columns, Line, SeedTable, Values, evenly_spaced
from feddumap.report.prunings import SeriesPruning, layers
from feddumap.system.console import metric_prefix

LOG_RATIO = 20  # costs above this multiple of the median are drawn on a logarithmic axis
PATTERNS = ("", "/", "x", ".", "-")  # of bars, where lines have dashes


@dataclass(frozen=True)
class Axis:
    """A column to draw: `name` is its label in the controls; values are divided by `scale`."""

    key: str
    name: str
    title: str
    scale: float = 1.0
    percent: bool = False
    log: bool = False


@dataclass(frozen=True)
class Chart:
    """A line chart with a choice of columns for each axis."""

    name: str
    title: str
    table: Literal["accuracy", "rounds"]
    x: tuple[Axis, ...]
    y: tuple[Axis, ...]


ROUNDS = Axis("round", "rounds", "rounds")


def charts(lines: Sequence[Line]) -> list[Chart]:
    """The line charts of these series: accuracy, the server update if any series has one, and cost."""

    def sized(table: str, key: str, name: str, title: str, unit: str) -> Axis:
        values = _values((getattr(line, table) for line in lines), key)
        middle, largest = median(values or [0.0]), max(values, default=0.0)
        log = table == "rounds" and largest > LOG_RATIO * middle and min(values) > 0
        scale, letter = (_time_unit if unit == "s" else metric_prefix)(middle if log else largest)
        shown = letter if unit == "s" else f"{letter}{unit}"
        return Axis(key, name, f"{title} ({shown})" if shown else title, scale, log=log)

    x = (
        ROUNDS,
        sized("accuracy", "time", "virtual time", "virtual time", "s"),
        sized("accuracy", "bytes", "bytes", "sent down and up", "B"),
    )
    y: tuple[Axis, ...] = (
        Axis("smooth", "smoothed", "test accuracy", percent=True),
        Axis("raw", "raw", "test accuracy", percent=True),
    )
    if any(value is not None for line in lines for value in line.accuracy.mean.get("device_mean", ())):
        title = "accuracy on a device's test data"
        y += (
            Axis("device_mean", "mean of devices", f"{title}, mean", percent=True),
            Axis("device_worst", "worst tenth of devices", f"{title}, worst tenth", percent=True),
        )
    found = [Chart("accuracy", "Test accuracy", "accuracy", x, y)]
    if any(value is not None for line in lines for value in line.rounds.mean["alpha"]):
        steps = (Axis("tau_eff", "τ_eff", "τ_eff (steps)"), Axis("alpha", "α", "α"))
        found.append(Chart("server", "Server update", "rounds", (ROUNDS,), steps))
    costs = (
        sized("rounds", "seconds", "virtual time", "virtual time per round", "s"),
        sized("rounds", "wall", "wall time", "wall time per round", "s"),
        sized("rounds", "down", "bytes down", "sent to devices per round", "B"),
        sized("rounds", "up", "bytes up", "sent by devices per round", "B"),
        sized("rounds", "parameters", "parameters", "parameters", ""),
        sized("rounds", "macs", "multiply-adds", "multiply-adds per image", ""),
    )
    found.append(Chart("cost", "Cost per round", "rounds", (ROUNDS,), costs))
    return found


def line_data(lines: Sequence[Line], found: Sequence[Chart]) -> list[dict[str, Any]]:
    """The series for the page's script: the columns that the charts draw, in the units of the axes.

    Columns of seeds and ranges that equal those of the mean are left out to reduce the size of the page.
    """
    scales = {axis.key: axis.scale for chart in found for axis in (*chart.x, *chart.y)}

    def columns(value: Columns) -> Columns:
        return {key: _rounded(numbers, scales[key]) for key, numbers in value.items() if key in scales}

    def table(value: SeedTable) -> dict[str, Any]:
        mean = columns(value.mean)

        def differing(other: Columns) -> Columns:
            return {key: numbers for key, numbers in columns(other).items() if numbers != mean.get(key)}

        alone = len(value.seeds) == 1
        return {
            "mean": mean,
            "low": differing(value.low),
            "high": differing(value.high),
            "members": value.members,
            "seeds": [
                {"seed": each.seed, "going": not each.finished, **differing(each.columns)}
                for each in ([] if alone else value.seeds)
            ],
        }

    return [
        {
            "label": plotly_text(line.label),
            **asdict(line.style),
            "accuracy": table(line.accuracy),
            "rounds": table(line.rounds),
        }
        for line in lines
    ]


def bars(group: Sequence[SeriesPruning], lines: Sequence[Line]) -> dict[str, Any]:
    """The share removed from each layer, one bar per series. A trace's `meta` is the index of its series."""
    traces = [
        {
            "type": "bar",
            "meta": {"line": pruned.place},
            "name": plotly_text(pruned.label),
            "x": [plotly_text(layer) for layer in pruned.removed],
            "y": _rounded(list(pruned.removed.values())),
            "marker": {"color": lines[pruned.place].style.colour, "pattern": _pattern(pruned.place)},
            "hovertemplate": f"{plotly_text(pruned.label)}<br>%{{x}}: %{{y:.1%}} removed<extra></extra>",
        }
        for pruned in group
    ]
    names = [plotly_text(layer) for layer in layers(group)]
    x = {"type": "category", "categoryorder": "array", "categoryarray": names}
    y = {"title": {"text": f"{group[0].what} removed"}, "tickformat": ".0%", "rangemode": "tozero"}
    return {
        "data": traces,
        "layout": {"barmode": "group", "bargap": 0.7 if len(group) == 1 else 0.3, "xaxis": x, "yaxis": y},
    }


def heat_map(found: LabelMixes) -> dict[str, Any]:
    """The label mixes as a heat map below the degrees; the server is a separate column on the left."""
    who = [f"device {device}" for device in found.devices]
    places = list(range(len(found.devices)))
    shares, degrees = found.shares.tolist(), found.degrees.tolist()
    if found.server is not None:  # followed by a gap
        who, places = ["the server", "", *who], [-2, -1, *places]
        shares = [found.server.tolist(), [None] * len(found.classes), *shares]
        degrees = [found.server_degree, None, *degrees]
    ticks = evenly_spaced(len(found.devices), 6)[
        0 if found.server is None else 1 :
    ]  # leaves room for the server's tick
    names = [plotly_text(name) for name in found.classes]
    data = [
        {
            "type": "heatmap",
            "x": places,
            "y": names,
            "z": [_rounded([row[label] for row in shares]) for label in range(len(names))],
            "text": [who] * len(names),
            "hovertemplate": "%{text}<br>%{y}: %{z:.1%}<extra></extra>",
            "hoverongaps": False,
            "zmin": 0,
            "colorbar": {
                "title": {"text": "share"},
                "tickformat": ".0%",
                "thickness": 10,
                "len": 0.72,
                "y": 0.36,
            },
        },
        {
            "type": "bar",
            "x": places,
            "y": _rounded(degrees),
            "yaxis": "y2",
            "text": who,
            "textposition": "none",
            "marker": {"color": "#D55E00"},
            "hovertemplate": "%{text}<br>degree %{y:.3f}<extra></extra>",
        },
    ]
    server = [] if found.server is None else [-2]
    layout = {
        "showlegend": False,
        "xaxis": {
            "title": {"text": "device"},
            "tickvals": [*server, *ticks],
            "ticktext": [*("server" for _ in server), *(str(found.devices[i]) for i in ticks)],
            "tickangle": 0,
            "showgrid": False,
        },
        "yaxis": {"domain": [0, 0.72], "autorange": "reversed", "showgrid": False, "type": "category"},
        "yaxis2": {"domain": [0.8, 1], "title": {"text": "degree"}, "range": [0, 1], "anchor": "x"},
    }
    return {"data": data, "layout": layout, "rows": len(names)}


def plotly_text(text: str) -> str:
    """Text escaped for plotly, which interprets a subset of HTML.

    >>> plotly_text("a <b> & c")
    'a &lt;b&gt; &amp; c'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _pattern(place: int) -> dict[str, Any]:
    shape = PATTERNS[place // len(COLOURS) % len(PATTERNS)]
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.75)", "size": 7}


def _values(tables: Iterable[SeedTable], key: str) -> list[float]:
    known = (value for table in tables for track in table.seeds for value in track.columns.get(key, ()))
    return [value for value in known if value is not None]


def _time_unit(largest: float) -> tuple[float, str]:
    """
    >>> _time_unit(90), _time_unit(838), _time_unit(15953)
    ((1.0, 's'), (60.0, 'min'), (3600.0, 'h'))
    """
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if largest >= 2 * size:
            return size, unit
    return 1.0, "s"


def _rounded(values: Sequence[float | None], scale: float = 1.0) -> Values:
    """Values rounded to six digits, to reduce the size of the page."""
    return [None if value is None else float(f"{value / scale:.6g}") for value in values]


def file_name(chart: Chart, x: Axis, y: Axis) -> str:
    """A file name from the chosen axes, such as accuracy-bytes-raw or cost-seconds."""
    parts = [chart.name, *([x.key] if len(chart.x) > 1 else []), *([y.key] if y.key != "smooth" else [])]
    return "-".join(parts).replace("_", "-")


def numbered(name: str, number: int, count: int) -> str:
    """
    >>> numbered("labels", 0, 1), numbered("labels", 1, 2)
    ('labels', 'labels-2')
    """
    return name if count == 1 else f"{name}-{number + 1}"
