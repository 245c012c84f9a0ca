"""`feddumap report`: what the page says, that nothing can break it, and the figures beside it."""

from __future__ import annotations

import re
import shutil
import struct
import sys
import webbrowser
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from feddumap import run as api
from feddumap.cli.main import app
from feddumap.errors import FeddumapError
from feddumap.report import figures
from feddumap.report.label_mixes import LabelMixes, label_mixes
from feddumap.report.lines import lines
from feddumap.report.page import document
from feddumap.report.page.sections import content
from feddumap.report.series import RecordedRun, find_runs, group_runs
from feddumap.runs.reader import read_records
from tests.conftest import small
from tests.support.report_runs import ROUNDS, again, make, page_data, write_records

FIGURES = {"accuracy-round", "accuracy-time-raw", "server-alpha", "cost-down", "pruning", "labels"}


@pytest.fixture(scope="module")
def runs(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of three runs, and FEDDUMAP_HOME for what is trained in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        yield make(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def made(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report, made by the command."""
    (runs / "feddumap" / "command.txt").write_text("feddumap train --set model.name=lenet <&>\n")
    out = tmp_path_factory.mktemp("made") / "report"
    result = CliRunner().invoke(app, ["report", str(runs), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"report: {out / 'index.html'}" in result.output.replace("\n", "")
    return out


@pytest.fixture(scope="module")
def text(made: Path) -> str:
    return (made / "index.html").read_text()


def page_of(runs: list[RecordedRun]) -> str:
    return document.html(content("title", runs))


def test_every_run_and_section_is_there(text: str, runs: Path) -> None:
    for key in ("accuracy", "comparison", "server", "cost", "pruning", "labels", "runs"):
        assert f'<section id="{key}">' in text
    for name in ("fedavg-1", "fedavg-2", "feddumap"):
        assert f"feddumap train {runs / name / 'config.toml'} --out NEW" in text
    assert "2 series · 3 runs · 2 seeds · lenet · digits" in text
    assert "<code>feddumap train --set model.name=lenet &lt;&amp;&gt;</code>" in text
    assert text.count("Command</dt>") == 1  # the others have no command.txt
    assert "prune_round = 2" in text
    assert "in training, " not in text


def test_the_curves_are_those_of_the_records(text: str, runs: Path) -> None:
    data = page_data(text)
    one, two = data["lines"]
    assert [one["label"], two["label"]] == ["fedavg", "feddumap"]
    assert (one["colour"], one["dash"], one["marker"]) != (two["colour"], two["dash"], two["marker"])
    records = read_records(runs / "feddumap")
    accuracy, rounds = two["accuracy"]["mean"], two["rounds"]["mean"]
    assert accuracy["round"] == [1, 2, 3, 4]
    assert accuracy["raw"] == pytest.approx([record["accuracy"] for record in records], rel=1e-5)
    assert accuracy["time"] == pytest.approx([record["clock"] for record in records], rel=1e-5)
    total = sum(record["bytes_down"] + record["bytes_up"] for record in records)
    assert accuracy["bytes"][-1] == pytest.approx(total / 1e6, rel=1e-5)
    assert data["charts"][0]["x"][2]["title"] == "sent down and up (MB)"
    assert rounds["seconds"][-1] == pytest.approx(records[-1]["clock"] - records[-2]["clock"], rel=1e-4)
    assert rounds["alpha"] == pytest.approx([record["alpha"] for record in records], rel=1e-5)
    assert rounds["tau_eff"] == pytest.approx([record["tau_eff"] for record in records], rel=1e-5)
    assert (two["accuracy"]["seeds"], two["accuracy"]["low"]) == ([], {})  # a single seed has no band


def test_seeds_have_a_mean_a_band_and_themselves(runs: Path) -> None:
    (fedavg, _) = lines(group_runs(find_runs([runs])))
    first = [record["accuracy"] for record in read_records(runs / "fedavg-1")]
    assert fedavg.accuracy.mean["raw"] == pytest.approx([value + 0.05 for value in first])
    assert fedavg.accuracy.low["raw"] == pytest.approx(first)
    assert fedavg.accuracy.high["smooth"] == pytest.approx([value + 0.1 for value in first])
    assert [(track.seed, len(track.columns["raw"])) for track in fedavg.accuracy.seeds] == [(1, 4), (2, 4)]


def test_a_mean_is_over_finished_seeds_else_over_what_all_have(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-1", tmp_path / "a")
    again(tmp_path / "a", tmp_path / "b", seed=2)
    again(tmp_path / "a", tmp_path / "c", seed=3, add=0.3)
    write_records(tmp_path / "c", read_records(tmp_path / "c")[:2])
    (tmp_path / "c" / "summary.json").unlink()
    (line,) = lines(group_runs(find_runs([tmp_path])))
    assert (line.accuracy.members, line.accuracy.mean["round"]) == (2, [1, 2, 3, 4])
    assert line.accuracy.mean["raw"] == line.accuracy.seeds[0].columns["raw"]  # the third is not in it
    assert [len(track.columns["round"]) for track in line.accuracy.seeds] == [4, 4, 2]
    text = page_of(find_runs([tmp_path]))
    assert "unfinished seeds are thin lines" in text
    assert [track["going"] for track in page_data(text)["lines"][0]["accuracy"]["seeds"]] == [
        False,
        False,
        True,
    ]
    for name in ("a", "b"):
        (tmp_path / name / "summary.json").unlink()
    (line,) = lines(group_runs(find_runs([tmp_path])))
    assert (line.accuracy.members, line.accuracy.mean["round"]) == (3, [1, 2])


def test_long_lines_are_thinned_and_smoothed_before(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-1", tmp_path / "long")
    first = read_records(runs / "fedavg-1")[0]
    records = [
        {**first, "round": number, "clock": float(number), "accuracy": number % 2 / 2}
        for number in range(3001)
    ]
    write_records(tmp_path / "long", records)
    found = find_runs([tmp_path])
    (line,) = lines(group_runs(found))
    assert len(line.accuracy.mean["raw"]) == 1000
    assert (line.accuracy.mean["round"][0], line.accuracy.mean["round"][-1]) == (1, 3001)
    middle = line.accuracy.mean["smooth"][500]
    assert middle is not None
    assert abs(middle - 0.25) < 0.05
    assert "Longer runs are thinned to 1,000 evenly spaced rounds." in page_of(found)


def test_figures_are_valid_and_the_same_again(made: Path, runs: Path) -> None:
    names = {path.stem for path in (made / "figures").glob("*.png")}
    assert names >= FIGURES
    assert {path.stem for path in (made / "figures").glob("*.svg")} == names
    for path in (made / "figures").iterdir():
        if path.suffix == ".png":
            data = path.read_bytes()
            assert data[:8] == b"\x89PNG\r\n\x1a\n"
            assert struct.unpack(">II", data[16:24]) > (600, 400)
        else:
            root = ElementTree.parse(path).getroot()
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert "<dc:date>" not in path.read_text()
    value = content("again", find_runs([runs]))
    drawings = figures.drawings(value.lines, value.charts, value.pruned, [])
    png, svg = figures.files(drawings["server-alpha"])
    assert (made / "figures" / "server-alpha.svg").read_bytes() == svg
    assert (made / "figures" / "server-alpha.png").read_bytes() == png


def test_every_figure_that_the_page_names_exists(made: Path, text: str) -> None:
    named = set(re.findall(r'href="figures/([\w-]+\.\w+)"', text))
    for chart in page_data(text)["charts"]:
        named |= {f"{name}.{kind}" for name in chart["files"].values() for kind in ("png", "svg")}
    assert named == {path.name for path in (made / "figures").iterdir()}


def test_the_page_alone(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures for a paper there are none to point to, and nothing is needed to draw them."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "feddumap.report.figures", raising=False)
    options = ["--out", str(tmp_path / "page"), "--no-figures", "--title", "LeNet5 <digits>"]
    result = CliRunner().invoke(app, ["report", str(runs), *options])
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["index.html"]
    text = (tmp_path / "page" / "index.html").read_text()
    assert '<body class="plain">' in text
    assert ".plain .files { display: none; }" in text
    assert 'href="figures/"' not in text
    assert "<h1>LeNet5 &lt;digits&gt;</h1>" in text


def test_what_was_pruned(text: str, runs: Path) -> None:
    (pruned,) = [record for record in read_records(runs / "feddumap") if "pruning" in record]
    layers = pruned["pruning"]["layers"]
    (figure,) = page_data(text)["pruning"]
    (bar,) = figure["data"]
    assert bar["x"] == list(layers)
    assert bar["y"] == pytest.approx(
        [1 - each["kept"] / each["filters"] for each in layers.values()], rel=1e-5
    )
    assert "Pruned after 2 rounds, at the rate 0.600." in text


class Loading(HTMLParser):
    """Collects the addresses that a page names, and its scripts' sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        for name, value in attributes:
            if name in ("src", "srcset", "data", "poster", "action", "xlink:href"):
                self.loaded.append(f"{tag} {value}")
            elif name == "href":
                (self.links if tag == "a" else self.loaded).append(value or "")


def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    found = Loading()
    found.feed(text)
    assert found.loaded == ["data:,"]  # no icon
    assert found.scripts == 3
    assert all(link.startswith(("#", "figures/")) for link in found.links)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in text


def test_names_cannot_break_the_page(runs: Path, tmp_path: Path) -> None:
    evil = "</script><b>x</b>&$a$"
    folder = tmp_path / "<" / "script><i>"
    shutil.copytree(runs / "feddumap", folder)
    (folder / "command.txt").write_text(evil)
    (run,) = find_runs([tmp_path])
    other = RecordedRun(run.path, run.config.replace(model={"name": evil}), run.records, finished=False)
    value = content(evil, [run, other])
    text = document.html(value)
    assert evil not in text
    assert "<i>" not in text
    assert "<b>" not in text.split("<script>")[0]
    found = Loading()
    found.feed(text)
    assert found.scripts == 3
    label = page_data(text)["lines"][1]["label"]
    assert label == "feddumap &lt;/script&gt;&lt;b&gt;x&lt;/b&gt;&amp;$a$"
    _, svg = figures.files(figures.drawings(value.lines, value.charts, [], [])["cost-down"])
    ElementTree.fromstring(svg)


def test_of_many_series_the_best_five_and_the_base_are_shown_first(runs: Path, tmp_path: Path) -> None:
    """Thirteen series, with accuracies that rise from the first, FedAvg's, to the last."""
    shutil.copytree(runs / "fedavg-1", tmp_path / "base")
    for number in range(1, 13):
        again(runs / "fedavg-1", tmp_path / f"lr-{number:02}", seed=1, add=number / 100)
        config = tmp_path / f"lr-{number:02}" / "config.toml"
        config.write_text(config.read_text().replace("lr = 0.05\n", f"lr = 0.{number + 60}\n"))
    found = find_runs([tmp_path])

    def checked(count: int) -> list[int]:
        return [int(place) for place in re.findall(r'checked data-line="(\d+)"', page_of(found[:count]))]

    assert checked(12) == list(range(12))
    labels = [line["label"] for line in page_data(page_of(found))["lines"]]
    assert [labels[place] for place in checked(13)] == [
        "fedavg lr=0.05",
        *(f"fedavg lr=0.{n}" for n in (68, 69, 7, 71, 72)),
    ]


def test_devices_that_were_lost_or_refused(runs: Path, tmp_path: Path, text: str) -> None:
    assert "Missing devices" not in text
    shutil.copytree(runs / "fedavg-1", tmp_path / "run")
    records = read_records(tmp_path / "run")
    records[0]["lost"] = {"3": "it has no node: it never connected"}
    records[1]["lost"] = {"3": "its node is not used: it says it is <b>device 1</b>"}
    write_records(tmp_path / "run", records)
    found = page_of(find_runs([tmp_path]))
    reason = "its node is not used: it says it is &lt;b&gt;device 1&lt;/b&gt;"
    assert f"<li>device 3, 2 rounds, last in round 1: {reason}</li>" in found


def test_a_run_that_is_still_going(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-1", tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    write_records(tmp_path / "run", read_records(tmp_path / "run")[:2], half='{"round": 2, "accu')
    text = page_of(find_runs([tmp_path]))
    assert text.count(f"in training, 2 of {ROUNDS} rounds") == 2  # at the top, and with the run
    assert page_data(text)["lines"][0]["accuracy"]["mean"]["round"] == [1, 2]


def test_a_run_without_an_evaluation(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-1", tmp_path / "run")
    records = [{**record, "accuracy": None, "loss": None} for record in read_records(tmp_path / "run")]
    write_records(tmp_path / "run", records)
    value = content("title", find_runs([tmp_path]))
    assert page_data(document.html(value))["lines"][0]["accuracy"]["mean"] == {"round": []}
    assert figures.files(figures.drawings(value.lines, value.charts, [], [])["accuracy-time"])[0]


def test_data_that_is_not_in_the_cache(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDUMAP_HOME", str(tmp_path))
    text = page_of(find_runs([runs]))
    assert "Label distribution unavailable: the data set digits is not in the cache" in text
    assert "run `feddumap data get digits` and rerun the report." in text
    assert page_data(text)["labels"] == []
    assert list(tmp_path.iterdir()) == []  # a report fetches nothing


def test_a_hundred_of_many_devices(home: Path, tmp_path: Path) -> None:
    api.train(small(data={"devices": 150}, train={"rounds": 1}), tmp_path / "run")
    found = find_runs([tmp_path])
    (mix,) = label_mixes(found)
    assert isinstance(mix, LabelMixes)
    assert (len(mix.devices), mix.devices[0], mix.devices[-1], mix.total) == (100, 0, 149, 150)
    assert mix.shares.sum(axis=1) == pytest.approx(1)
    text = page_of(found)
    assert "100 of 150 devices, evenly spaced." in text
    (heat, degrees) = page_data(text)["labels"][0]["data"]
    assert len(heat["x"]) == len(degrees["y"]) == 102  # the server, and a gap
    assert heat["hovertemplate"].startswith("%{text}")


def test_what_is_missing_is_said(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FeddumapError, match="is a file: expected a folder"):
        document.write(tmp_path / "file", content("title", find_runs([runs])), lambda *_: None)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(FeddumapError, match=r"plotly.* is not installed: pip install 'feddumap\[report\]'"):
        document.require_packages()


def test_the_page_is_opened_when_asked(
    made: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)))
    monkeypatch.setattr(document, "write", lambda folder, *_, **__: folder / "index.html")
    result = CliRunner().invoke(app, ["report", str(runs / "fedavg-1"), "--out", str(tmp_path), "--open"])
    assert opened == [(tmp_path / "index.html").as_uri()]
    assert "no browser was found" in result.output
