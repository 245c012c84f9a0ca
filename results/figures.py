"""Draws the figures of the README and of docs/results.md from the finished runs in results/runs.

    python results/figures.py       # writes docs/images/*.svg

Lines are smoothed as in the paper; a band is the range over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from comparisons import HEADLINE
from finished import TARGETS, chosen, name
from matplotlib.figure import Figure

from feddumap.report.figures import files
from feddumap.report.lines import style
from feddumap.report.series import RecordedRun, Series
from feddumap.runs.summary import smooth

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MEGABYTES, MINUTES = 1e6, 60.0
POINTS = 4  # rounds between two points of a line, for small files


def clock(run: RecordedRun) -> np.ndarray:
    return np.array([record["clock"] for record in run.records]) / MINUTES


def sent(run: RecordedRun) -> np.ndarray:
    return np.cumsum([record["bytes_down"] + record["bytes_up"] for record in run.records]) / MEGABYTES


AXES: tuple[tuple[str, Callable[[RecordedRun], np.ndarray]], ...] = (
    ("virtual time (min)", clock),
    ("sent in all (MB)", sent),
)


def curve(each: Series, across: Callable[[RecordedRun], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of `across`, and the smoothed test accuracies [seeds, rounds] in percent."""
    places = np.mean([across(run) for run in each.runs], axis=0)[::POINTS]
    curves = [smooth([record["accuracy"] for record in run.records])[::POINTS] for run in each.runs]
    return places, 100 * np.array(curves)


def headline(data: str, model: str) -> Figure:
    """Accuracy over virtual time and over bytes, side by side."""
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    panels: Sequence = figure.subplots(1, 2, sharey=True)
    found = {HEADLINE[key]: each for each in chosen(data, model) if (key := name(each)) in HEADLINE}
    for panel, (title, across) in zip(panels, AXES, strict=True):
        for place, label in enumerate(HEADLINE.values()):
            if label not in found:
                continue
            places, accuracies = curve(found[label], across)
            seeds = len(accuracies)
            colour = style(place).colour
            panel.fill_between(
                places, accuracies.min(axis=0), accuracies.max(axis=0), color=colour, alpha=0.15, linewidth=0
            )
            panel.plot(places, accuracies.mean(axis=0), color=colour, linewidth=1.3,
                       label=f"{label} ({seeds} seed{'s' if seeds > 1 else ''})")  # fmt: skip
        panel.axhline(100 * TARGETS[data, model], color="#888888", linewidth=0.6, linestyle=(0, (4, 3)))
        panel.set_xlabel(title)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=25)
    panels[0].set_ylabel("test accuracy (%)")
    panels[1].legend(frameon=False, loc="lower right")
    return figure


def main() -> None:
    for model in ("lenet", "cnn"):
        path = IMAGES / f"cifar10-{model}.svg"
        _, svg = files(partial(headline, "cifar10", model))
        path.write_bytes(svg)
        print(path)


if __name__ == "__main__":
    main()
