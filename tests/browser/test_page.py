"""The report's page in Chromium: it loads without an error, and everything that can be chosen works.

Run by `make test-browser`, which installs playwright; Chromium has to be there.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from feddumap.report.page import document as report
from feddumap.report.page.sections import content
from feddumap.report.series import find_runs
from feddumap.runs.reader import read_records
from tests.support.report_runs import again, make, write_records

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ROUNDS, SERIES = 60, 11
EVIL = "<img src=x onerror=alert(1)>"
DESKTOP = {"width": 1360, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.exit("chromium is not on the PATH: install it, on Debian with apt-get install chromium", 1)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has no sandbox
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page about eleven series and twelve runs, of sixty rounds each; a path tries to break it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        folder = make(tmp_path_factory.mktemp("runs"))
        for name in ("fedavg-1", "fedavg-2", "feddumap"):
            lengthen(folder / name)
        for number in range(SERIES - 3):
            copy = folder / f"lr-{number}"
            again(folder / "fedavg-1", copy, seed=1, add=number / 100)
            config = copy / "config.toml"
            config.write_text(config.read_text().replace("lr = 0.05\n", f"lr = 0.{number + 1}\n"))
        again(
            folder / "feddumap", folder / f"z{EVIL}", seed=1
        )  # the second of a configuration: named by its path
        path = report.write(folder / "report", content(EVIL, find_runs([folder])), lambda *_: None)
        yield path.as_uri()


def lengthen(run: Path) -> None:
    """Go on with a run's records as if it had learned for sixty rounds, unevenly."""
    first = read_records(run)
    for number in range(len(first), ROUNDS):
        last, accuracy = first[-1], 0.9 - 0.8 * math.exp(-number / 15) + 0.05 * math.sin(number * 1.7)
        seconds = {"clock": last["clock"] + 1.5, "wall": last["wall"] + 0.1}
        first.append({**last, **seconds, "round": number, "accuracy": accuracy})
    write_records(run, first)


@dataclass
class Opened:
    """A page, and what it complained of or asked the network for."""

    page: Page
    troubles: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("console", lambda message: self.troubles.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: self.troubles.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.asked(request.url))

    def asked(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.troubles.append(f"request {url}")

    def plot(self, name: str, what: str) -> Any:
        """Part of what plotly shows in a figure, such as data.length."""
        return self.page.evaluate(f"document.getElementById('plot-{name}').{what}")

    def drawn(self, name: str) -> list[int]:
        """The series that a figure shows."""
        places: list[int] = self.plot(name, "data.map((trace) => trace.meta.line)")
        return sorted(set(places))

    def until(self, condition: str) -> None:
        """Wait for a condition. Playwright's own way to wait needs eval, which the page's policy forbids."""
        for _ in range(100):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(100)
        pytest.fail(f"waited in vain for {condition}")

    def choose(self, name: str, value: str) -> None:
        self.page.locator(f'input[name="{name}"][value="{value}"]').check(force=True)


def opened(context: BrowserContext, address: str) -> Opened:
    found = Opened(context.new_page())
    found.watch()
    found.page.goto(address)
    found.until("[...document.querySelectorAll('.plot')].every((each) => each.data)")
    return found


@pytest.fixture
def desktop(browser: Browser, address: str) -> Iterator[Opened]:
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    found = opened(context, address)
    yield found
    assert found.troubles == []
    context.close()


@pytest.fixture
def phone(browser: Browser, address: str) -> Iterator[Opened]:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True, color_scheme="light")
    found = opened(context, address)
    yield found
    assert found.troubles == []
    context.close()


def test_every_run_and_figure_is_there(desktop: Opened) -> None:
    assert desktop.page.locator("[data-line]").count() == SERIES
    assert desktop.page.locator("#runs details").count() == SERIES + 1
    for name in ("accuracy", "cost"):
        assert desktop.drawn(name) == list(range(SERIES))
    assert len(desktop.drawn("server")) == 2
    for plot in desktop.page.locator(".plot").all():
        assert plot.locator("svg.main-svg").count() > 0
    assert desktop.page.locator("h1").inner_text() == EVIL
    assert any(EVIL in label for label in desktop.page.locator(".legend label").all_inner_texts())


def test_nothing_can_be_sent(desktop: Opened) -> None:
    titles = desktop.page.locator("#plot-accuracy .modebar-btn").evaluate_all(
        "(buttons) => buttons.map((button) => button.dataset.title)"
    )
    assert titles == ["Download plot", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]


def test_smoothed_and_raw(desktop: Opened) -> None:
    smooth = desktop.plot("accuracy", "data.at(-1).y")
    desktop.choose("accuracy-y", "raw")
    raw = desktop.plot("accuracy", "data.at(-1).y")
    assert len(smooth) == len(raw) == ROUNDS
    assert sum(abs(a - b) for a, b in pairwise(raw)) > 2 * sum(abs(a - b) for a, b in pairwise(smooth))
    href = desktop.page.locator("#files-accuracy a").first.get_attribute("href")
    assert href == "figures/accuracy-round-raw.svg"


def test_the_axes_that_can_be_chosen(desktop: Opened) -> None:
    for value, title in (
        ("time", "virtual time (s)"),
        ("bytes", "sent down and up (MB)"),
        ("round", "rounds"),
    ):
        desktop.choose("accuracy-x", value)
        assert desktop.plot("accuracy", "layout.xaxis.title.text") == title
    desktop.choose("cost-y", "parameters")
    assert desktop.plot("cost", "layout.yaxis.title.text") == "parameters (k)"
    desktop.choose("server-y", "alpha")
    assert desktop.plot("server", "layout.yaxis.title.text") == "α"


def test_bands_and_single_seeds(desktop: Opened) -> None:
    before = desktop.plot("accuracy", "data.length")
    assert desktop.plot("accuracy", "data.filter((trace) => trace.fill === 'tonexty').length") == 1
    desktop.page.get_by_label("single seeds").first.check()
    assert desktop.plot("accuracy", "data.length") == before + 2


def test_the_legend_governs_all_figures(desktop: Opened) -> None:
    desktop.page.locator('[data-line="0"]').focus()
    desktop.page.keyboard.press("Space")
    for name in ("accuracy", "cost"):
        assert desktop.drawn(name) == list(range(1, SERIES))
    assert desktop.page.locator("#count").inner_text() == f"{SERIES - 1} of {SERIES} shown"
    desktop.page.get_by_role("button", name="none", exact=True).click()
    assert desktop.drawn("accuracy") == desktop.drawn("pruning-0") == []
    desktop.page.get_by_role("button", name="best five").click()
    assert len(desktop.drawn("accuracy")) == 5
    assert desktop.plot("accuracy", "data.length") > 5  # so few that the raw curves are behind
    desktop.page.get_by_role("button", name="all", exact=True).click()
    assert desktop.drawn("accuracy") == list(range(SERIES))


def test_a_series_is_pointed_at(desktop: Opened) -> None:
    traces = "document.querySelectorAll('#plot-cost .scatterlayer .trace')"
    faint = f"[...{traces}].filter((each) => each.style.opacity).length"
    desktop.page.locator('label:has([data-line="3"])').hover()
    assert desktop.page.evaluate(faint) == desktop.plot("cost", "data.length") - 1
    desktop.page.locator("h1").hover()
    assert desktop.page.evaluate(faint) == 0


def test_the_theme(desktop: Opened) -> None:
    light = desktop.plot("accuracy", "layout.font.color")
    button = desktop.page.get_by_role("button", name="dark")
    button.click()
    assert desktop.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert button.get_attribute("aria-pressed") == "true"
    assert desktop.plot("accuracy", "layout.font.color") != light
    desktop.page.reload()
    assert desktop.page.evaluate("document.documentElement.dataset.theme") == "dark"  # it is remembered
    desktop.page.get_by_role("button", name="dark").click()
    assert desktop.plot("accuracy", "layout.font.color") == light


def test_the_systems_theme_is_the_default(browser: Browser, address: str) -> None:
    context = browser.new_context(viewport=DESKTOP, color_scheme="dark")
    found = opened(context, address)
    assert found.page.evaluate("document.documentElement.dataset.theme") == "dark"
    found.page.emulate_media(color_scheme="light")
    found.until("document.documentElement.dataset.theme === 'light'")
    assert found.troubles == []
    context.close()


def test_hover_and_zoom(desktop: Opened) -> None:
    desktop.page.locator("#plot-accuracy").scroll_into_view_if_needed()
    box = desktop.page.locator("#plot-accuracy .nsewdrag").first.bounding_box()
    assert box is not None
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    whole = desktop.plot("accuracy", "layout.xaxis.range")
    for height in range(10, int(box["height"]), 10):
        desktop.page.mouse.move(middle[0], box["y"] + height)
        if desktop.page.locator("#plot-accuracy .hovertext").count():
            break
    desktop.page.wait_for_selector("#plot-accuracy .hovertext")
    assert "rounds: " in desktop.page.locator("#plot-accuracy .hovertext").first.text_content()
    desktop.page.mouse.move(*middle)
    desktop.page.mouse.down()
    desktop.page.mouse.move(middle[0] + 150, middle[1] + 100, steps=5)
    desktop.page.mouse.up()
    desktop.until(f"document.getElementById('plot-accuracy').layout.xaxis.range[0] > {whole[0]} + 1")
    zoomed = desktop.plot("accuracy", "layout.xaxis.range")
    desktop.page.locator('[data-line="0"]').uncheck()
    assert desktop.plot("accuracy", "layout.xaxis.range") == zoomed  # hiding a series keeps the zoom
    desktop.page.locator("#plot-accuracy").hover()
    desktop.page.locator('#plot-accuracy [data-title="Reset axes"]').click()
    desktop.until(f"document.getElementById('plot-accuracy').layout.xaxis.range[0] < {zoomed[0]}")


def test_tables_are_sorted(desktop: Opened) -> None:
    table = desktop.page.locator("table.sortable").first
    head = table.get_by_role("button", name="final (%)")
    column = table.locator("thead th").evaluate_all(
        "(all) => all.findIndex((e) => e.innerText === 'final (%)')"
    )
    values = f"(rows) => rows.map((row) => Number(row.cells[{column}].dataset.sort))"
    head.click()
    down = table.locator("tbody tr").evaluate_all(values)
    assert down == sorted(down, reverse=True)
    assert len(set(down)) > 1
    head.click()
    assert table.locator("tbody tr").evaluate_all(values) == sorted(down)


def test_the_keyboard_is_enough(desktop: Opened) -> None:
    desktop.page.keyboard.press("Tab")
    assert desktop.page.evaluate("document.activeElement.className") == "skip"
    desktop.page.keyboard.press("Enter")
    desktop.page.keyboard.press("Tab")
    assert desktop.page.evaluate("document.activeElement.name") == "accuracy-y"
    outline = "getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
    assert desktop.page.evaluate(outline) == "solid"
    desktop.page.keyboard.press("ArrowRight")
    assert desktop.page.locator('input[name="accuracy-y"][value="raw"]').is_checked()


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_does_not_scroll_sideways(phone: Opened, width: int) -> None:
    phone.page.set_viewport_size({"width": width, "height": 844})
    phone.page.wait_for_timeout(300)
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= width
    for summary in phone.page.locator("summary").all():
        summary.click()
    phone.page.wait_for_timeout(300)
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= width
    assert phone.plot("accuracy", "layout.dragmode") is False  # a finger scrolls the page


def test_a_phones_legend_is_closed_at_first(phone: Opened) -> None:
    assert not phone.page.locator('[data-line="0"]').is_visible()
    phone.page.locator(".legend summary").tap()
    phone.page.locator('[data-line="0"]').uncheck()
    assert phone.drawn("accuracy") == list(range(1, SERIES))
