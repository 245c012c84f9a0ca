"""Methods of the user's own: keys from plain parameters, names of objects, and entry points."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import feddumap
from feddumap import methods
from feddumap.config import MethodConfig
from feddumap.core.algorithm import Algorithm
from feddumap.errors import FeddumapError
from feddumap.methods import Method, objects, registry
from feddumap.methods.fedavg import train_with
from feddumap.methods.fedprox import Proximal
from feddumap.methods.listing import listed
from feddumap.methods.registry import RECIPES, compose, keys, resolve
from feddumap.training.optimizers import sgd
from tests.conftest import small
from tests.support.command_line import CommandLine

HERE = "tests.methods.test_own_methods"
SEEN: dict[str, Any] = {}


def plain(mu: float = 0.1, *, steps: int = 5, kind: Literal["a", "b"] = "a") -> Algorithm:
    """A method with plain keys."""
    SEEN.update(mu=mu, steps=steps, kind=kind)
    return Algorithm(local=train_with(sgd()))


def mixed(pull: Proximal, steps: int, limit: float | None = None) -> Algorithm:
    SEEN.update(pull=pull, steps=steps, limit=limit)
    return Algorithm(local=train_with(sgd()))


def untyped(mu=0.1) -> Algorithm:  # type: ignore[no-untyped-def]
    return plain()


def untypable(start: torch.Tensor) -> Algorithm:
    return plain()


def rest(**keys: float) -> Algorithm:
    return plain()


def clash(pull: Proximal, mu: float = 1.0) -> Algorithm:
    return plain()


ALGORITHM = Algorithm(local=train_with(sgd()))
NEITHER = 3


def settings(name: str, **given: Any) -> dict[str, Any]:
    return resolve(MethodConfig.model_validate({"name": f"{HERE}:{name}", **given})).settings


def test_plain_parameters_are_keys() -> None:
    assert settings("plain", mu=2) == {"mu": 2.0, "steps": 5, "kind": "a"}
    assert keys(f"{HERE}:plain") == [
        ("mu", "float", 0.1, ""),
        ("steps", "int", 5, ""),
        ("kind", "a | b", "a", ""),
    ]
    compose(small(method={"name": f"{HERE}:plain", "mu": 0.25, "kind": "b"}))
    assert SEEN == {"mu": 0.25, "steps": 5, "kind": "b"}


def test_groups_and_plain_parameters_together() -> None:
    compose(small(method={"name": f"{HERE}:mixed", "mu": 0.5, "steps": 2}))
    assert (SEEN["pull"], SEEN["steps"], SEEN["limit"]) == (Proximal(mu=0.5), 2, None)


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        (
            "plain",
            {"muu": 1},
            "unknown key method.muu: did you mean method.mu\\? Keys of .*: mu, steps, kind",
        ),
        ("plain", {"steps": 1.5}, "method.steps = 1.5: input should be a valid integer"),
        ("plain", {"kind": "c"}, "method.kind = 'c': input should be 'a' or 'b'"),
        ("mixed", {}, "method.steps is missing: .*mixed has no default for it; set it"),
        ("untyped", {}, "the parameter 'mu' of untyped has no type: annotate it, such as mu: float = 0.1"),
        ("untypable", {}, "the parameters of untypable .* cannot be keys of .*: annotate them with types"),
        ("rest", {}, r"rest has the parameter '\*\*keys: float': expected named parameters"),
        ("clash", {}, "clash cannot have a parameter 'mu': the name is taken"),
        ("NEITHER", {}, "is 3: expected a function that makes an Algorithm, or an Algorithm"),
        ("nothing", {}, "has no attribute 'nothing'"),
    ],
)
def test_mistakes_are_one_sentence(name: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FeddumapError, match=sentence) as error:
        settings(name, **given)
    assert "\n" not in str(error.value)


def test_a_method_is_a_value_with_checked_settings() -> None:
    assert Method("fedprox", mu=0.2) == Method("fedprox", mu=0.2) != Method("fedprox", mu=0.3)
    assert Method(plain, mu=0.2).config.model_dump() == {"name": f"{HERE}:plain", "mu": 0.2}
    with pytest.raises(FeddumapError, match=r"unknown key method\.c"):
        Method("fedprox", c=1.0)
    with pytest.raises(FeddumapError, match="unknown method 'fedprx': did you mean 'fedprox'"):
        Method("fedprx")
    with pytest.raises(AttributeError):
        Method("fedavg").settings = {}  # type: ignore[misc]


def test_every_method_of_the_table_is_a_function_of_its_keys() -> None:
    for name in RECIPES:
        make = getattr(methods, name.replace("-", "_"))
        assert make() == Method(name)
        assert list(inspect.signature(make).parameters) == [key for key, *_ in keys(name)]
        assert make.__doc__.startswith(RECIPES[name].summary)
        assert make.__name__ in methods.__all__
    made = feddumap.methods.feddumap(c=1.0, prune_round=30)
    assert resolve(made.config) == resolve(
        MethodConfig.model_validate({"name": "feddumap", "c": 1.0, "prune_round": 30})
    )
    with pytest.raises(FeddumapError, match=r"unknown key method\.cc"):
        feddumap.methods.feddumap(cc=1.0)


def of_main(mu: float = 0.1) -> Algorithm:
    return plain(mu)


def test_names_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_OBJECTS", {})
    assert registry.register_object(RECIPES["feddu"].build) == "feddu"
    assert registry.register_object(plain) == f"{HERE}:plain"
    monkeypatch.setattr(of_main, "__module__", "__main__")
    assert registry.register_object(of_main) == "python:of_main"
    assert settings_of(of_main) == {"mu": 0.1}

    def made(mu: float) -> Callable[[], Algorithm]:
        return lambda: plain(mu)

    one, two = made(1.0), made(2.0)
    names = [registry.register_object(each) for each in (one, two, one)]
    assert names[0] == names[2] != names[1]
    for name, mu in zip(names[:2], (1.0, 2.0), strict=True):
        compose(small(method={"name": name}))
        assert SEEN["mu"] == mu
    assert registry.register_object(ALGORITHM) == "python:algorithm"
    assert Method(ALGORITHM).config.name == "python:algorithm"
    assert compose(small(method={"name": "python:algorithm"})).shared == ALGORITHM.shared
    with pytest.raises(FeddumapError, match="method = 3: expected a method's name, a function"):
        Method(3)  # type: ignore[arg-type]
    with pytest.raises(FeddumapError, match="'python:gone' is a Python object of the process that started"):
        registry.find("python:gone")


def settings_of(build: Callable[..., Algorithm]) -> dict[str, Any]:
    return resolve(Method(build).config).settings


def test_the_decorator_names_a_users_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OWN", {})
    feddumap.method("my-plain")(plain)
    assert resolve(Method("my-plain", steps=2).config).name == f"{HERE}:plain"  # found by workers too
    assert "my-plain" not in RECIPES
    with pytest.raises(FeddumapError, match="the method name 'fedavg' is taken"):
        feddumap.method("fedavg")(plain)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installed packages that offer methods; one is broken, one takes a name that is taken."""
    (tmp_path / "offering.py").write_text(
        "import feddumap\n"
        "def fedfoo(mu: float = 0.5) -> feddumap.Algorithm:\n"
        "    '''Foo.'''\n"
        "    return feddumap.Algorithm(local=lambda t, s: t.plan(t.model(), s, feddumap.proximal(mu)))\n"
    )
    (tmp_path / "broken_offer.py").write_text("import nowhere_at_all\n")
    for name, offers in {
        "offering": "fedfoo = offering:fedfoo\nfedavg = offering:fedfoo",
        "broken-offer": "fedbad = broken_offer:fedbad",
    }.items():
        info = tmp_path / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[feddumap.methods]\n{offers}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "offering", raising=False)
    return tmp_path


def test_methods_of_other_packages(
    packages: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compose(small())
    assert "offering" not in sys.modules  # nothing is imported before it is used
    found, broken = listed()
    assert found[0]["from"] == "feddumap"
    assert found[-1] == {
        "name": "fedfoo",
        "summary": "Foo.",
        "from": "offering 1.2",
        "keys": {"mu": {"type": "float", "default": 0.5, "description": ""}},
    }
    assert len(broken) == 2
    assert "method 'fedavg' of offering 1.2 cannot be used: feddumap has a method of that name" in broken[0]
    assert "method 'fedbad' of broken-offer 1.2 cannot be imported" in broken[1]
    assert "No module named 'nowhere_at_all'" in broken[1]
    code, printed, errors = CommandLine(monkeypatch, capsys)("methods")
    assert (code, "offering 1.2" in printed) == (0, True)
    assert "fedbad" in errors
    with pytest.raises(FeddumapError, match=r"'fedbad' of broken-offer 1\.2 cannot be imported"):
        Method("fedbad")
    run = feddumap.train(small(method={"name": "fedfoo"}, train={"rounds": 1}, run={"workers": 2}))
    assert run.config.method.model_dump() == {"name": "fedfoo", "mu": 0.5}  # found by workers too


def test_import_is_instant() -> None:
    code = (
        "import sys, feddumap\n"
        "assert not {'torch', 'numpy', 'pydantic', 'feddumap.methods'} & set(sys.modules)\n"
        "assert set(feddumap.__all__) <= set(dir(feddumap))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_everything_a_method_needs_is_there() -> None:
    for name in feddumap.__all__:
        assert getattr(feddumap, name) is not None
    assert feddumap.sgd is sgd
    with pytest.raises(AttributeError, match="module 'feddumap' has no attribute 'sdg'"):
        feddumap.sdg  # noqa: B018
