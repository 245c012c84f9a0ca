"""Where networks come from: what a factory may take, and one sentence for each mistake."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from feddumap import models
from feddumap import run as api
from feddumap.core.messages import InputSpec
from feddumap.errors import FeddumapError
from tests.support.methods import outcome, tiny

GREY = InputSpec("image", (1, 8, 8))
TEXT = InputSpec("tokens", (5,), vocabulary=11)


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


seen: list[dict[str, Any]] = []


def told(**values: Any) -> nn.Module:
    seen.append(values)
    return linear(64, 3)


TAKES: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing": (lambda: told(), {}),
    "classes": (lambda classes: told(a=classes), {"a": 3}),
    "num_classes": (lambda x=7, num_classes=9: told(a=num_classes, x=x), {"a": 3, "x": 7}),
    "n_classes": (lambda *, n_classes: told(a=n_classes), {"a": 3}),
    "by-position": (lambda outputs, /: told(a=outputs), {"a": 3}),
    "any-name": (lambda outputs, width=2: told(a=outputs, w=width), {"a": 3, "w": 2}),
    "input": (
        lambda input_shape, in_channels, vocabulary, k: told(s=input_shape, c=in_channels, v=vocabulary, k=k),
        {"s": (1, 8, 8), "c": 1, "v": 0, "k": 3},
    ),
    "anything": (lambda *args, **kwargs: told(args=args, kwargs=kwargs), {"args": (3,), "kwargs": {}}),
}


@pytest.mark.parametrize("name", TAKES)
def test_what_a_factory_may_take(name: str) -> None:
    function, expected = TAKES[name]
    models.register(f"takes-{name}", function)
    seen.clear()
    models.architecture(f"takes-{name}", 3, GREY)
    assert seen
    assert all(values == expected for values in seen)


def test_settings_are_keyword_arguments() -> None:
    def make(classes: int, widths: tuple[int, ...], dropout: float = 0.5) -> nn.Module:
        layers = [nn.Linear(a, b) for a, b in zip((64, *widths), (*widths, classes), strict=True)]
        return nn.Sequential(nn.Flatten(), *layers, nn.Dropout(dropout))

    models.register("settled", make)
    shape = models.architecture("settled", 3, GREY, {"widths": [5, 4], "dropout": 0.25})
    network = models.build(shape)
    assert [m.out_features for m in network if isinstance(m, nn.Linear)] == [5, 4, 3]
    assert network[-1].p == 0.25
    assert models.parameters(shape) == 64 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3
    for settings, message in [
        ({"width": [5]}, r"unknown key model.width: settled takes widths, dropout"),
        ({"widths": [5], "classes": 4}, r"model.classes = 4: the data set decides .* \(3\); remove"),
        ({"widths": {"a": 1}}, r"model.widths = \{'a': 1\}: expected numbers, text or lists"),
        (
            {},
            r"the factory failed \(TypeError: .* argument: 'widths'\) for the input image 1×8×8 and 3",
        ),
    ]:
        with pytest.raises(FeddumapError, match=message):
            models.architecture("settled", 3, GREY, settings)


class Strange(nn.Module):
    """A network with something wrong in it."""

    def __init__(self, change: Any = None, forward: Any = None) -> None:
        super().__init__()
        self.inner = linear(64, 3)
        self.change = forward
        if change:
            change(self)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        return self.change(self, y) if self.change else y


def shared_memory(module: nn.Module) -> None:
    module.other = nn.Linear(64, 3)  # type: ignore[assignment]
    module.other.weight.data = module.inner[1].weight.data


def changed(**keys: Any) -> Any:
    return lambda: Strange(**keys)


GLOBAL = linear(64, 3)

WRONG: dict[str, tuple[Any, str]] = {
    "raises": (lambda: 1 / 0, r"the factory failed \(ZeroDivisionError: division by zero\)"),
    "no module": (lambda: 3, "the factory returned int, expected a torch.nn.Module"),
    "input": (
        lambda: linear(10, 3),
        r"cannot take a batch of shape \[2, 1, 8, 8\] \(image 1×8×8\) in evaluation mode \(RuntimeError: m",
    ),
    "classes": (
        lambda: linear(64, 4),
        r"returns float32 \[2, 4\] in evaluation mode, expected float32 \[2, 3\]",
    ),
    "shape": (changed(forward=lambda _, y: y[:, :, None]), r"returns float32 \[2, 3, 1\]"),
    "two": (changed(forward=lambda _, y: (y, y)), r"returns tuple in evaluation mode, expected one tensor"),
    "training": (
        changed(forward=lambda m, y: {"y": y} if m.training else y),
        "returns dict in training mode, expected one tensor",
    ),
    "type": (changed(forward=lambda _, y: y.double()), r"returns float64 \[2, 3\]"),
    "double": (lambda: linear(64, 3).double(), r"the parameter 1.weight is float64, expected float32"),
    "lazy": (
        lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)),
        "the size of 1.weight is not known before data arrives",
    ),
    "no parameters": (lambda: nn.Flatten(), "it has no parameters, so there is nothing to train"),
    "all frozen": (lambda: linear(64, 3).requires_grad_(False), "all its parameters are frozen"),
    "same": (lambda: GLOBAL, "two calls of the factory returned the same parameter 1.weight"),
    "memory": (
        changed(change=shared_memory),
        "the parameters inner.1.weight and other.weight share memory: to tie them, assign the parameter",
    ),
    "slash": (
        lambda: nn.Sequential(nn.Flatten(), nn.ModuleDict({"a/b": nn.Linear(64, 3)})),
        r"the name of 1.a/b.weight has a slash",
    ),
    "buffer": (
        changed(change=lambda m: m.register_buffer("b", torch.zeros(2, dtype=torch.complex64))),
        "the buffer b is complex64, expected one of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_one_sentence(name: str) -> None:
    function, message = WRONG[name]
    models.register(f"wrong-{name}", function)
    with pytest.raises(FeddumapError, match=message) as caught:
        models.architecture(f"wrong-{name}", 3, GREY)
    assert str(caught.value).startswith(f"model.name = 'wrong-{name}'")
    assert "\n" not in str(caught.value)


def test_a_buffer_that_is_not_finite_is_refused() -> None:
    infinite = torch.full((2, 2), -torch.inf)
    models.register("infinite", changed(change=lambda m: m.register_buffer("mask", infinite.clone())))
    shape = models.architecture("infinite", 3, GREY)
    with pytest.raises(FeddumapError, match=r"mask is not finite at the start: .*persistent=False"):
        models.initialise(shape, 1)


def test_text_for_a_network_with_an_embedding() -> None:
    def make(classes: int, vocabulary: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(vocabulary, 4), nn.Flatten(), nn.Linear(20, classes))

    models.register("reader", make)
    shape = models.architecture("reader", 3, TEXT)
    assert models.parameters(shape) == 11 * 4 + 20 * 3 + 3
    assert [row.macs for row in models.layer_table(shape)] == [0, 60]
    with pytest.raises(FeddumapError, match=r"takes? a batch of shape \[2, 1, 8, 8\]"):
        models.architecture("reader", 3, GREY)


NETS = """
from torch import nn
five = 5
def make(classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.ReLU(), nn.Linear(width, classes))
"""


def test_a_module_in_the_current_folder(
    home: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets_of_mine.py").write_text(NETS, encoding="utf-8")
    (tmp_path / "broken_nets.py").write_text("import nowhere_to_be_found\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    model = {"name": "nets_of_mine:make", "width": 6}
    one = api.train(tiny(model=model, train={"rounds": 1}))
    assert one.state.weights["1.weight"].shape == (6, 256)
    two = api.train(tiny(model=model, train={"rounds": 1}, run={"workers": 2}))
    assert outcome(one) == outcome(two)
    for name, message in [
        (
            "no_such_nets:make",
            r"cannot be imported \(No module named 'no_such_nets'\): expected module:model",
        ),
        ("broken_nets:make", r"cannot be imported \(.*broken_nets.py:1: No module named 'nowhere_to_be_"),
        ("nets_of_mine:mak", "cannot be imported .*'nets_of_mine' has no attribute 'mak'"),
        ("nets_of_mine:five", "is of type int: expected a function or class"),
        ("nets_of_mine", "unknown model 'nets_of_mine'"),
    ]:
        with pytest.raises(FeddumapError, match=message):
            models.architecture(name, 10)


@pytest.mark.slow
def test_the_command_says_it_without_a_traceback(home: object, tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text(NETS.replace("256", "255"), encoding="utf-8")
    code = "import sys; from feddumap.cli.main import main; sys.path[:] = sys.path[1:]; main()"
    command = [sys.executable, "-c", code, "train", "--set", "data.name=digits", "--set", "train.rounds=1"]
    command += ["--set", "model.name=my_nets:make", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert "model.name = 'my_nets:make': the network cannot take a batch of shape [2, 1, 16, 16]" in said
    assert not (tmp_path / "run").exists()


def test_networks_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("their-net", "their_package:net", "feddumap.models")
    package = ModuleType("their_package")
    package.net = lambda classes: linear(64, classes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_package", package)
    found = {"feddumap.models": [entry]}
    monkeypatch.setattr(metadata, "entry_points", lambda *, group, name=None: found[group])
    assert models.parameters(models.architecture("their-net", 3, GREY)) == 65 * 3
    with pytest.raises(FeddumapError, match="did you mean 'their-net'"):
        models.architecture("their-nat", 3, GREY)


class Library:
    """Stands for torchvision and timm: their two functions, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def get_model(self, name: str, *, weights: str | None, num_classes: int = 1000, **rest: Any) -> nn.Module:
        self.calls.append({"name": name, "weights": weights, "classes": num_classes, **rest})
        if name != "net":
            raise ValueError(f"Unknown model {name}")
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, num_classes))
        if weights:
            nn.init.constant_(made[1].weight, 0.125)
        return made

    def create_model(
        self, name: str, *, pretrained: bool, num_classes: int, in_chans: int, **rest: Any
    ) -> nn.Module:
        self.calls.append({"pretrained": pretrained, "classes": num_classes, "channels": in_chans, **rest})
        return self.get_model(name, weights="x" if pretrained else None, num_classes=num_classes)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    vision, timm = ModuleType("torchvision"), ModuleType("timm")
    vision.models = SimpleNamespace(get_model=made.get_model)  # type: ignore[attr-defined]
    timm.create_model = made.create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setattr(models.registry, "_FAMILIES", dict(models.registry._FAMILIES))
    models.registry._full_channels.cache_clear()
    return made


@pytest.mark.parametrize("name", ["torchvision:net", "timm:net"])
def test_networks_of_libraries(library: Library, name: str) -> None:
    """Pretrained weights are read once, when a run begins; the last layer is made for the classes."""
    plain = models.architecture(name, 3, GREY)
    shape = models.architecture(name, 3, GREY, {"pretrained": True})
    assert not any(call.get("weights") or call.get("pretrained") for call in library.calls)
    weights = models.initialise(shape, 1)
    assert (weights["1.weight"] == 0.125).all()
    assert weights["2.weight"].shape == (3, 5)
    assert not torch.equal(weights["2.weight"], models.initialise(shape, 2)["2.weight"])
    assert torch.equal(weights["2.weight"], models.initialise(shape, 1)["2.weight"])
    assert not (models.initialise(plain, 1)["1.weight"] == 0.125).any()
    assert models.network(shape, weights)(GREY.example(2)).shape == (2, 3)
    if name == "timm:net":
        assert all(call["channels"] == 1 for call in library.calls if "channels" in call)
    with pytest.raises(FeddumapError, match=r"the factory failed \(ValueError: Unknown model nat\)"):
        models.architecture(name.replace("net", "nat"), 3, GREY)


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(FeddumapError, match=r"'timm:x' needs the package timm, .*'feddumap\[timm\]'"):
        models.architecture("timm:x", 3, GREY)
