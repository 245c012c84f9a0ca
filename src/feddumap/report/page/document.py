"""A self-contained HTML page about runs, and its static figures."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from html import escape
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from feddumap import __version__
from feddumap.errors import FeddumapError
from feddumap.report import charts
from feddumap.report.label_mixes import LabelMixes
from feddumap.report.page.parts import legend, unfinished_runs
from feddumap.report.page.sections import FAINT, Content, lead, sections
from feddumap.system.atomic_files import write_bytes, write_text
from feddumap.system.callbacks import Progress

# the page is self-contained: it loads and sends nothing
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "form-action 'none'; base-uri 'none'"
)

CROWDED = 12  # with more series than this, the page first shows the best five and the base


def require_packages(*, figures: bool = True) -> None:
    """Raise an error if the packages that draw the page and its figures are not installed."""
    for name in ("plotly", "matplotlib") if figures else ("plotly",):
        try:
            import_module(name)
        except ImportError:
            raise FeddumapError(
                f"a report needs the package {name}, which is not installed: pip install 'feddumap[report]'"
            ) from None


def write(folder: Path, value: Content, progress: Progress, *, figures: bool = True) -> Path:
    """Write the figures and the page, or only the page; returns the path of the page."""
    if folder.exists() and not folder.is_dir():
        raise FeddumapError(f"--out {folder} is a file: expected a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if figures:
        _draw(folder / "figures", value, progress)
    write_text(folder / "index.html", html(value, figures=figures))
    return folder / "index.html"


def _draw(folder: Path, value: Content, progress: Progress) -> None:
    from feddumap.report import figures as static

    folder.mkdir(exist_ok=True)
    shown = [mix for mix in value.mixes if isinstance(mix, LabelMixes)]
    drawings = static.drawings(value.lines, value.charts, value.pruned, shown)
    for done, (name, drawing) in enumerate(drawings.items()):
        progress("figures", done, len(drawings))
        png, svg = static.files(drawing)
        write_bytes(folder / f"{name}.png", png)
        write_bytes(folder / f"{name}.svg", svg)
    progress("figures", len(drawings), len(drawings))


def html(value: Content, *, figures: bool = True) -> str:
    """The HTML of the page."""
    from plotly.offline import get_plotlyjs

    resources = files("feddumap.report.page")
    css, script = (resources.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    shown = sections(value)
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in shown)
    body = "".join(f'<section id="{key}"><h2>{title}</h2>{inner}</section>' for key, title, inner in shown)
    kinds = [*(["alone"] if len(value.lines) == 1 else []), *([] if figures else ["plain"])]
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    elsewhere = 'They are also in the folder <a href="figures/">figures</a>.' if figures else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="generator" content="feddumap {__version__}">
<title>{escape(value.title)} · feddumap report</title>
<link rel="icon" href="data:,">
<style>{css}</style>
</head>
<body{kind}>
<a class="skip" href="#main">Skip to the figures</a>
<header>
<div class="bar"><p class="mark">feddumap report</p>
<button type="button" id="theme" aria-pressed="false">dark</button></div>
<h1>{escape(value.title)}</h1>
<p class="lead">{escape(lead(value))}</p>
{unfinished_runs(value.series)}
<nav aria-label="Sections">{links}</nav>
<noscript><p class="missing">The interactive figures need JavaScript. {elsewhere}</p></noscript>
</header>
<div class="layout">
<aside aria-label="Series">{legend(value.lines, _first_shown(value))}</aside>
<main id="main" tabindex="-1">{body}</main>
</div>
<footer>Made by feddumap {__version__}.</footer>
<script type="application/octet-stream" id="data">{_packed(_json(_script_data(value)))}</script>
<script type="application/octet-stream" id="plotly">{_packed(get_plotlyjs())}</script>
<script>{script}</script>
</body>
</html>
"""


def _packed(text: str) -> str:
    """Text compressed, in base64: plotly is 2 MB so instead of 4.8. The page's script decompresses it."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _best(value: Content) -> list[int]:
    """The five series that are best in the last ten rounds."""
    scores = [mean10.mean if (mean10 := row.accuracy["mean10"]) else 0.0 for row in value.compared.rows]
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:5]


def _first_shown(value: Content) -> set[int]:
    if len(value.lines) <= CROWDED:
        return set(range(len(value.lines)))
    base = [place for place, row in enumerate(value.compared.rows) if row.label == value.compared.base]
    return {*_best(value), *base}


def _script_data(value: Content) -> dict[str, Any]:
    """The data of the page's script."""

    def axis(each: charts.Axis) -> dict[str, Any]:
        return {"key": each.key, "title": each.title, "percent": each.percent, "log": each.log}

    return {
        "lines": charts.line_data(value.lines, value.charts),
        "best": _best(value),
        "faint": FAINT,
        "charts": [
            {
                "name": chart.name,
                "table": chart.table,
                "x": list(map(axis, chart.x)),
                "y": list(map(axis, chart.y)),
                "files": {
                    f"{x.key} {y.key}": charts.file_name(chart, x, y) for x in chart.x for y in chart.y
                },
            }
            for chart in value.charts
        ],
        "pruning": [charts.bars(group, value.lines) for group in value.pruned],
        "labels": [charts.heat_map(mix) for mix in value.mixes if isinstance(mix, LabelMixes)],
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
