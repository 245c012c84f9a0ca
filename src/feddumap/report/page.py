"""One page about some runs, which needs nothing but itself, and the figures for a paper beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from feddumap import __version__
from feddumap.errors import FeddumapError
from feddumap.files import write_bytes, write_text
from feddumap.report import plots
from feddumap.report.mixes import Mix
from feddumap.report.parts import going, legend
from feddumap.report.sections import FAINT, Content, lead, sections

# what the page needs is in it: nothing is loaded from anywhere, and nothing sent
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "form-action 'none'; base-uri 'none'"
)
Progress = Callable[[str, int, int], None]  # what, done, of how many


def needed() -> None:
    """Say so at once if what draws figures is not installed."""
    for name in ("plotly", "matplotlib"):
        try:
            import_module(name)
        except ImportError:
            raise FeddumapError(
                f"{name}, which draws a report's figures, is not installed: pip install 'feddumap[report]'"
            ) from None


def write(folder: Path, value: Content, progress: Progress) -> Path:
    """The figures, then the page that refers to them; returns the page's path."""
    from feddumap.report import static

    if folder.exists() and not folder.is_dir():
        raise FeddumapError(f"--out {folder} is a file: give the name of a folder")
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    shown = [mix for mix in value.mixes if isinstance(mix, Mix)]
    drawings = static.drawings(value.lines, value.charts, value.pruned, shown)
    for done, (name, drawing) in enumerate(drawings.items()):
        progress("figures", done, len(drawings))
        png, svg = static.files(drawing)
        write_bytes(folder / "figures" / f"{name}.png", png)
        write_bytes(folder / "figures" / f"{name}.svg", svg)
    progress("figures", len(drawings), len(drawings))
    write_text(folder / "index.html", html(value))
    return folder / "index.html"


def html(value: Content) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs

    resources = files("feddumap.report")
    css, script = (resources.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    plotly = get_plotlyjs().replace("</script", "<\\/script")
    shown = sections(value)
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in shown)
    body = "".join(f'<section id="{key}"><h2>{title}</h2>{inner}</section>' for key, title, inner in shown)
    alone = ' class="alone"' if len(value.lines) == 1 else ""
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
<body{alone}>
<a class="skip" href="#main">Skip to the figures</a>
<header>
<div class="bar"><p class="mark">feddumap report</p>
<button type="button" id="theme" aria-pressed="false">dark</button></div>
<h1>{escape(value.title)}</h1>
<p class="lead">{escape(lead(value))}</p>
{going(value.series)}
<nav aria-label="Sections">{links}</nav>
<noscript><p class="missing">The interactive figures need JavaScript. The same figures are in the folder
<a href="figures/">figures</a>, as PNG and SVG.</p></noscript>
</header>
<div class="layout">
<aside aria-label="Series">{legend(value.lines)}</aside>
<main id="main" tabindex="-1">{body}</main>
</div>
<footer>Made by feddumap {__version__}.</footer>
<script type="application/json" id="data">{_embedded(_data(value))}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def _data(value: Content) -> dict[str, Any]:
    """What the page's script draws."""
    from feddumap.report.static import file_name

    def axis(each: plots.Axis) -> dict[str, Any]:
        return {"key": each.key, "title": each.title, "percent": each.percent, "log": each.log}

    scores = [mean10.mean if (mean10 := row.accuracy["mean10"]) else 0.0 for row in value.compared.rows]
    return {
        "lines": plots.line_data(value.lines, value.charts),
        "best": sorted(range(len(scores)), key=lambda place: -scores[place])[:5],
        "faint": FAINT,
        "charts": [
            {
                "name": chart.name,
                "table": chart.table,
                "x": list(map(axis, chart.x)),
                "y": list(map(axis, chart.y)),
                "files": {f"{x.key} {y.key}": file_name(chart, x, y) for x in chart.x for y in chart.y},
            }
            for chart in value.charts
        ],
        "pruning": [plots.bars(group, value.lines) for group in value.pruned],
        "labels": [plots.heat(mix) for mix in value.mixes if isinstance(mix, Mix)],
    }


def _embedded(value: Any) -> str:
    """JSON that cannot end the script element it is in, whatever a label says."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
