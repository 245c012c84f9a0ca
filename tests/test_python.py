"""The Python interface: `feddumap.Run` and what belongs to it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import FrozenInstanceError
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import feddumap
from feddumap import run as api
from feddumap.config import Config
from feddumap.core.algorithm import Algorithm
from feddumap.core.tensors import digest
from feddumap.engine.configured import sections_of_keys
from feddumap.errors import FeddumapError
from feddumap.methods.fedavg import train_with
from feddumap.runs.reader import read_config, read_records
from feddumap.training.optimizers import sgd
from tests.conftest import SMALL, small

KEYS: dict[str, Any] = {
    "devices": 6,
    "cohort": 3,
    "rounds": 3,
    "epochs": 1,
    "batch": 32,
    "lr": 0.05,
    "workers": 1,
}


class Net(nn.Module):
    """For images of any size."""

    def __init__(self, classes: int, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(2))
        self.head = nn.Linear(64, classes)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(images).mean(1)) * self.scale.mean()
        return out


def own(**keys: Any) -> feddumap.Run:
    """A run of a network without a name of its own."""
    given = {"model": lambda classes: Net(classes), **KEYS, "profile": "general", "say": api.ignore}
    return feddumap.Run(**{**given, **keys})


def weights(run: feddumap.Run) -> str:
    return digest(run.state.weights)


def test_arguments_are_the_keys_of_a_configuration(home: Path) -> None:
    run = feddumap.Run("lenet", **KEYS, say=api.ignore).run()
    assert run.config == api.train(small()).config
    assert weights(run) == weights(api.train(small()))
    other = feddumap.Run(
        config=SMALL, method={"name": "fedprox", "mu": 0.5}, rounds=np.int64(1), say=api.ignore
    )
    assert other.config.method.settings == {"mu": 0.5}
    assert (other.config.train.rounds, other.config.data.devices) == (1, 6)
    assert other.config.model.name == "lenet"


def test_every_key_has_one_section() -> None:
    known = sections_of_keys()
    dumped = Config().model_dump()
    for section in ("data", "train", "clock", "run"):
        assert {key for key in dumped[section] if key != "name"} == {
            k for k, v in known.items() if v == section
        }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"round": 3}, "unknown argument of Run 'round': did you mean 'rounds'"),
        ({"lr": -1}, "train.lr = -1: input should be greater than 0"),
        ({"model": 3}, "model=3: expected a name, a factory"),
        ({"method": 3}, "method = 3: expected a method's name"),
        ({"data": 3}, "data=3: expected a name, a path"),
        ({"method": "fedavgg"}, "unknown method 'fedavgg': did you mean 'fedavg'"),
        ({"model": {"width": 3}}, "has no name"),
        (
            {"model": lambda classes: Net(classes), "engine": "ray"},
            "cannot send model.name = 'python:.*<lambda>",
        ),
    ],
)
def test_mistakes_are_one_sentence(home: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FeddumapError, match=message):
        feddumap.Run(**{**KEYS, "say": api.ignore, **arguments})


def test_records_are_typed_and_still_mappings(home: Path) -> None:
    run = own(method="feddu")
    records = list(run)
    assert records == run.records
    last = records[-1]
    assert (last.round, last.accuracy, last.metrics["alpha"]) == (2, last["accuracy"], last["alpha"])
    assert "alpha" in last
    assert "beta" not in last
    assert json.loads(json.dumps(dict(last))) == last
    with pytest.raises(FrozenInstanceError):
        last.round = 4  # type: ignore[misc]
    assert sum(record.bytes_up for record in records) == run.summary["bytes_up"]


def test_one_verb_starts_goes_on_and_extends(home: Path, tmp_path: Path) -> None:
    expected = own(rounds=5).run()
    first = own(rounds=4, out=tmp_path / "run")
    for record in first:
        if record.round == 1:
            break
    second = own(rounds=4, out=tmp_path / "run", workers=2)  # a cell run again: the first is closed
    assert first.directory is None
    assert second.state.round == 2
    second.run()
    assert [record.round for record in second.records] == [0, 1, 2, 3]
    with own(rounds=5, out=tmp_path / "run") as third:
        assert [record.round for record in third] == [4]
    assert weights(third) == weights(expected)
    assert read_config(tmp_path / "run").model.name == "python:own.<locals>.<lambda>"
    with pytest.raises(FeddumapError, match=r"another configuration \(train.lr is 0.05 there, 0.1 here\)"):
        own(rounds=5, out=tmp_path / "run", lr=0.1)
    with pytest.raises(FeddumapError, match=r"train.rounds is 5 there, 2 here"):
        own(rounds=2, out=tmp_path / "run")


def test_a_run_that_nobody_closed_can_be_opened_again(home: Path, tmp_path: Path) -> None:
    api.start(small(), tmp_path / "run")
    assert api.resume(tmp_path / "run").run().finished


def test_objects_must_be_passed_again_and_be_the_same(home: Path, tmp_path: Path) -> None:
    own(out=tmp_path / "run", rounds=1).run().close()
    with pytest.raises(
        FeddumapError, match=r"model.name = 'python:own.<locals>.<lambda>' is an object of a Python"
    ):
        api.resume(tmp_path / "run")

    def other(factory: Any) -> feddumap.Run:
        factory.__qualname__ = "own.<locals>.<lambda>"
        return own(model=factory, out=tmp_path / "run", rounds=1)

    assert other(lambda classes: Net(classes)).finished
    with pytest.raises(FeddumapError, match=r"another network .*scale is .*\[4\], expected .*\[5\]"):
        other(lambda classes: Net(classes, width=5))


def test_two_networks_of_one_name_do_not_mix(home: Path) -> None:
    plain, halved = own(), None

    def factory(classes: int) -> nn.Module:
        made = Net(classes)
        nn.init.constant_(made.scale, 0.5)
        return made

    factory.__qualname__ = "own.<locals>.<lambda>"
    halved = own(model=factory)
    assert float(halved.model().scale.detach().mean()) == 0.5  # type: ignore[operator, union-attr]
    assert float(plain.model().scale.detach().mean()) == 1.0  # type: ignore[operator, union-attr]
    assert halved.summary["model"] == plain.summary["model"]


def test_a_network_is_copied_with_its_weights(home: Path, tmp_path: Path) -> None:
    given = Net(10)
    before = deepcopy(given.state_dict())
    run = own(model=given, out=tmp_path / "run")
    assert all(torch.equal(run.state.weights[name], tensor) for name, tensor in before.items())
    next(iter(run))
    assert all(torch.equal(given.state_dict()[name], tensor) for name, tensor in before.items())
    expected = own(model=given).run()
    nn.init.zeros_(given.head.weight)  # whatever becomes of it: the run began with what it was
    again = own(model=given, out=tmp_path / "run").run()
    assert weights(again) == weights(expected)
    assert isinstance(again.model(), Net)


def test_methods_as_functions_and_values(home: Path) -> None:
    expected = weights(own(method="fedavg").run())

    def local(rate: float = 1.0) -> Algorithm:
        return Algorithm(local=train_with(sgd()))

    run = own(method=local)
    assert run.config.method.model_dump() == {"name": run.config.method.name, "rate": 1.0}
    assert run.config.method.name.startswith("python:")
    assert weights(run.run()) == expected
    assert weights(own(method=Algorithm(local=train_with(sgd()))).run()) == expected
    assert weights(own(method={"name": local, "rate": 2.0}, workers=2).run()) == expected
    assert own(method=feddumap.Method(local, rate=3.0)).config.method.settings == {"rate": 3.0}
    assert own(method=feddumap.methods.feddu(c=0.5)).config.method.settings["c"] == 0.5


def arrays(shift: float = 0.0) -> feddumap.Dataset:
    inputs = np.random.default_rng(1).normal(size=(60, 5)).astype(np.float32) + shift
    labels = np.arange(60) % 3
    return feddumap.Dataset(train=(inputs, labels), test=(inputs[:15], labels[:15]))


def test_data_in_memory(home: Path, tmp_path: Path) -> None:
    """Workers map it, whether they are forked from here or not; it must be passed again to go on."""

    def runs(data: Any, **keys: Any) -> feddumap.Run:
        given = {"devices": 4, "partition": "iid", "server_fraction": 0.0, "out": tmp_path / "run"}
        return own(**{"data": data, "model": lambda classes: nn.Linear(5, classes), **given, **keys})

    run = runs(arrays()).run()
    assert run.config.data.name == f"python:{arrays().digest[:16]}"
    run.close()
    ended = runs(arrays(), rounds=4, workers=2).run()
    assert (ended.state.round, ended.dataset.classes) == (4, ("0", "1", "2"))
    named = [runs(arrays(), model="mlp", out=None, workers=workers).run() for workers in (1, 2)]
    assert weights(named[0]) == weights(named[1])
    with pytest.raises(FeddumapError, match=r"data.name is 'python:\w+' there, 'python:"):
        runs(arrays(shift=1.0), rounds=4)
    with pytest.raises(FeddumapError, match="pass the data again"):
        runs("python:0123456789abcdef")


def test_callbacks_see_every_round_and_stop(home: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def watch(run: feddumap.Run, record: feddumap.Record) -> bool:
        seen.append((record.round, len(run.records)))
        return record.round == 1

    run = own(callbacks=[watch], out=tmp_path / "run", rounds=5)
    assert [record.round for record in run] == [0, 1]
    assert seen == [(0, 1), (1, 2)]
    assert (tmp_path / "run" / "summary.json").exists()
    for record in run:  # goes on
        assert record.round == 2
        run.stop()
    assert len(run.records) == 3


def test_early_stopping_ends_at_the_same_round_after_a_resume(home: Path, tmp_path: Path) -> None:
    stopping = feddumap.EarlyStopping(patience=2, min_delta=0.9)  # never that much better
    run = own(callbacks=[stopping], rounds=9)
    assert len(run.run().records) == 3  # the first counts as better than nothing

    parts = own(callbacks=[stopping], rounds=9, out=tmp_path / "run")
    next(iter(parts))
    with own(callbacks=[stopping], rounds=9, out=tmp_path / "run") as again:
        assert len(again.run().records) == 3
    with own(callbacks=[stopping], rounds=9, out=tmp_path / "run") as once_more:
        assert list(once_more) == []
    held = own(callbacks=[feddumap.EarlyStopping(2, "validation", 0.9)], rounds=9, validation=10)
    assert len(held.run().records) == 3
    with pytest.raises(FeddumapError, match="needs held-out samples"):
        own(callbacks=[feddumap.EarlyStopping(2, "validation")]).run()
    for wrong in ({"patience": 0}, {"measure": "loss"}):
        with pytest.raises(FeddumapError, match="EarlyStopping"):
            feddumap.EarlyStopping(**wrong)  # type: ignore[arg-type]


def test_a_loop_left_by_an_error_can_be_begun_again(home: Path, tmp_path: Path) -> None:
    run = own(out=tmp_path / "run", workers=2)
    kept = iter(run)
    next(kept)  # as a traceback keeps a loop alive
    assert [record.round for record in run] == [1, 2]
    assert next(kept, None) is None
    run.close()
    assert weights(run) == weights(own().run())


class Text(HTMLParser):
    """Every tag and the text of a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_a_run(home: Path) -> None:
    def evil(classes: int) -> nn.Module:
        return Net(classes)

    evil.__qualname__ = "<script>alert(1)</script>"
    run = own(model=evil, rounds=2)
    assert "svg" not in Text(run._repr_html_()).tags
    shown = Text(run.run()._repr_html_())
    assert {"table", "svg", "polyline"} <= set(shown.tags)
    assert "script" not in shown.tags
    assert "<script>alert(1)</script>" in shown.text
    assert "2 of 2" in shown.text
    (points,) = re.findall(r'points="([^"]+)"', run._repr_html_())
    assert len(points.split()) == 2


def test_comparing_from_python(home: Path, tmp_path: Path) -> None:
    runs = [own(seed=seed, out=tmp_path / str(seed)).run() for seed in (1, 2)]
    other = own(seed=1, method="fedprox").run()
    for run in runs:
        run.close()
    compared = feddumap.compare([runs[0], tmp_path / "2", other])
    assert [row["label"] for row in compared.data["series"]] == ["fedavg", "fedprox"]
    assert "| fedprox | 1 |" in compared.to_markdown()
    assert "fedprox" in str(compared)
    assert {"table", "caption", "li"} <= set(Text(compared._repr_html_()).tags)
    with pytest.raises(FeddumapError, match="no runs are given"):
        feddumap.compare([])
    with pytest.raises(FeddumapError, match="a run in memory has no finished round"):
        feddumap.compare([own()])


def test_reporting_from_python(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    kept, free = own(out=tmp_path / "run").run(), own(method="fedprox").run()
    own(method="fedprox", out=tmp_path / "other").run()
    page = kept.report(tmp_path / "one", figures=False)
    assert page == tmp_path / "one" / "index.html"
    assert "python:own.&lt;locals&gt;.&lt;lambda&gt;" in page.read_text()
    both = feddumap.compare([kept, tmp_path / "other"]).report(tmp_path / "both", figures=False)
    assert "fedprox" in both.read_text()
    with pytest.raises(FeddumapError, match="give it an `out`"):
        free.report(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_table_of_pandas_or_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[Mapping[str, Any]]] = []

    class Frame(list[Mapping[str, Any]]):
        def __init__(self, rows: list[Mapping[str, Any]]) -> None:
            super().__init__(rows)
            made.append(rows)

    run = own(rounds=1, validation=10).run()
    monkeypatch.setitem(sys.modules, "pandas", type("pandas", (), {"DataFrame": Frame}))
    assert run.frame() == made[0]
    assert made[0][0]["validation.accuracy"] == run.records[0].metrics["validation"]["accuracy"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FeddumapError, match=r"frame\(\) needs the package pandas"):
        run.frame()


def test_records_on_disk_are_the_same(home: Path, tmp_path: Path) -> None:
    run = own(out=tmp_path / "run").run()
    assert read_records(tmp_path / "run") == run.records
    again = own(out=tmp_path / "run")
    assert again.records == run.records
    assert again.records[0].devices == run.records[0].devices
