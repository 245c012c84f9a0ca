"""What is wrong with a user's method is one sentence that names the slot, before anything is written or, if
it happens later, with a checkpoint to go on from."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from feddumap import run as api
from feddumap.core.algorithm import Algorithm, Merged, RoundView, ServerStep, at_round, mean_of_uploads
from feddumap.core.messages import Upload
from feddumap.core.record import Record
from feddumap.engine import rehearsal
from feddumap.errors import FeddumapError
from feddumap.methods.fedavg import train_with
from feddumap.methods.registry import RECIPES, find
from feddumap.methods.slot_values import RESERVED
from feddumap.training.optimizers import UpdateRule, sgd
from tests.conftest import small
from tests.support.methods import outcome

HERE = "tests.methods.test_guard"
LOCAL = train_with(sgd())
Apply = Callable[..., Any]


def algorithm(**slots: Any) -> Algorithm:
    return Algorithm(**{"local": LOCAL, **slots})


def server(apply: Apply, init: Callable[..., Any] = lambda state: {}) -> dict[str, Any]:
    return {"server": ServerStep(init, apply)}


def without_first(weights: dict[str, Any]) -> dict[str, Any]:
    return dict(list(weights.items())[1:])


def odd_upload(task: Any, samples: Any) -> Upload:
    weights = {name: tensor[:1] for name, tensor in task.broadcast.weights.items()}
    return Upload(task.device, task.broadcast.round, len(samples), 1, weights)


def with_extra(task: Any, samples: Any) -> Upload:
    upload = Upload(task.device, task.broadcast.round, len(samples), 1, dict(task.broadcast.weights))
    return replace(upload, extra={"c/nowhere": torch.zeros(1)})


def keeps_numbers(task: Any, samples: Any) -> Any:
    task.kept["h"] = 3
    return Upload(task.device, task.broadcast.round, len(samples), 1, dict(task.broadcast.weights))


def fails(*_: Any) -> Any:
    raise KeyError("no such thing")


def bad_rule(task: Any, samples: Any) -> Any:
    return task.plan(task.model(), samples, UpdateRule(lambda space: [], fails))


def bad_report(task: Any, samples: Any) -> Any:
    return task.plan(task.model(), samples, sgd(), lambda steps: steps)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "made None: expected an Algorithm"),
    "no_local": (lambda: algorithm(local=3), "its local is a value of type int, no function"),
    "no_server": (lambda: algorithm(server=fails), "its server is a value of type function: expected a Serv"),
    "device_data": (
        lambda: algorithm(device_data=lambda task: [1]),
        "its device_data returned a value of type list: expected Samples",
    ),
    "local": (
        lambda: algorithm(local=lambda task, samples: 3),
        r"its local returned a value of type int: expected a Plan \(task.plan\(...\)\) or an Upload",
    ),
    "upload_shapes": (
        lambda: algorithm(local=odd_upload),
        r"its local returned an Upload whose weights have 'conv1.weight' as float32 \[1, .*: expected fl",
    ),
    "upload_extra": (
        lambda: algorithm(local=with_extra),
        "an Upload whose extra has 'c/nowhere': expected na",
    ),
    "kept": (lambda: algorithm(local=keeps_numbers), "its local returned with task.kept has 'h' of type int"),
    "rule": (lambda: algorithm(local=bad_rule), "its rule's step failed at .*test_guard.py:"),
    "report": (
        lambda: algorithm(local=bad_report),
        "its report returned a value of type int: expected an Up",
    ),
    "aggregate": (
        lambda: algorithm(aggregate=lambda uploads, view: next(iter(uploads)).weights),
        "its aggregate returned a value of type dict: expected Merged",
    ),
    "aggregate_names": (
        lambda: algorithm(
            aggregate=lambda uploads, view: Merged(without_first(mean_of_uploads(uploads, view).weights))
        ),
        "its aggregate returned Merged whose weights lack 'conv1.weight'",
    ),
    "aggregate_fails": (
        lambda: algorithm(aggregate=fails),
        r"its aggregate failed at .*test_guard.py:\d+ \(KeyError: 'no such thing'\): fix it; .*a rehearsal",
    ),
    "init": (
        lambda: algorithm(**server(lambda w, s, v: (w, s, {}), lambda state: [1])),
        "its server.init returned what is of type list: expected a dict of tensors by name",
    ),
    "init_values": (
        lambda: algorithm(**server(lambda w, s, v: (w, s, {}), lambda state: {"count": 1})),
        "its server.init returned what has 'count' of type int",
    ),
    "apply": (
        lambda: algorithm(**server(lambda w, s, v: (w, s))),
        r"its server.apply returned a tuple of dict, dict: expected \(weights, steps, metrics\)",
    ),
    "apply_types": (
        lambda: algorithm(**server(lambda w, s, v: ({n: t.double() for n, t in w.items()}, s, {}))),
        "its server.apply returned weights that have 'conv1.weight' as float64 .*: expected float32 ",
    ),
    "metrics": (
        lambda: algorithm(**server(lambda w, s, v: (w, s, {"x": torch.ones(())}))),
        r"its server.apply returned metrics with 'x' = tensor\(1.\) .*: expected what JSON holds",
    ),
    "metrics_nan": (
        lambda: algorithm(**server(lambda w, s, v: (w, s, {"x": float("nan")}))),
        "its server.apply returned metrics with 'x' = nan",
    ),
    "metrics_name": (
        lambda: algorithm(**server(lambda w, s, v: (w, s, {"accuracy": 1.0}))),
        "its server.apply returned metrics named 'accuracy', which a record has already",
    ),
    "send": (lambda: algorithm(send=lambda state: {"x": torch.ones(1)}), "its send returned what has 'x'"),
    "reshape": (
        lambda: algorithm(reshape=at_round(2, lambda state, context, cohort: state)),  # type: ignore[arg-type, return-value]
        r"its reshape returned a value of type ServerState: expected \(ServerState, metrics\)",
    ),
    "check": (lambda: algorithm(check=fails), "its check failed at"),
    "function": (lambda: fails(1), "its function failed at .*test_guard.py:"),
}
for name, (make, _) in WRONG.items():
    make.__module__ = HERE
    globals()[f"wrong_{name}"] = make


@pytest.mark.parametrize("name", WRONG)
def test_wrong_slots_are_refused_before_anything_is_written(home: Path, tmp_path: Path, name: str) -> None:
    config = small(method={"name": f"{HERE}:wrong_{name}"})
    with pytest.raises(FeddumapError, match=f"^method '{HERE}:wrong_{name}'.* ?{WRONG[name][1]}") as error:
        api.start(config, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_reserved_names_are_those_of_a_record() -> None:
    own = {field.name for field in fields(Record)} - {"metrics"}
    assert (
        own | {"validation", "dropped", "rejected", "lost", "dominant", "device_accuracy", "backdoor"}
        == RESERVED
    )


def taken_name() -> Algorithm:
    """`clipped` is a mapping of devices in the records of a run that clips."""
    return algorithm(**server(lambda w, s, v: (w, s, {"clipped": 0.25})))


def test_a_metric_with_the_name_of_another_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers would take the record for damaged, and cut it off."""
    config = small(method={"name": f"{HERE}:taken_name"})
    said = r"^round 0: the method's metric clipped: .* dictionary; .* choose another one$"
    with pytest.raises(FeddumapError, match=said):
        api.start(config)
    monkeypatch.setenv("FEDDUMAP_REHEARSAL", "0")
    run = api.start(config, home / "run")
    with pytest.raises(FeddumapError, match=said):
        next(iter(run))
    assert not (home / "run" / "records.jsonl").exists()


def not_finite() -> Algorithm:
    return algorithm(**server(lambda w, s, v: ({n: t * float("inf") for n, t in w.items()}, s, {})))


def whole_federation() -> Algorithm:
    """What a rehearsal cannot have: more samples than it gives."""

    def local(task: Any, samples: Any) -> Any:
        assert len(samples) > rehearsal.BATCH * rehearsal.BATCHES, "too few"
        return LOCAL(task, samples)

    return algorithm(local=local)


def test_weights_that_are_not_finite_are_not_refused(home: Path) -> None:
    api.start(small(method={"name": f"{HERE}:not_finite"})).close()


def test_the_rehearsal_can_be_skipped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(method={"name": f"{HERE}:whole_federation"}, train={"rounds": 1})
    with pytest.raises(FeddumapError, match=r"AssertionError: too few.*FEDDUMAP_REHEARSAL=0 skips"):
        api.start(config)
    monkeypatch.setenv("FEDDUMAP_REHEARSAL", "0")
    assert len(api.train(config).records) == 1


def uses_global_generator() -> Algorithm:
    def local(task: Any, samples: Any) -> Any:
        torch.rand(3)
        return LOCAL(task, samples)

    return algorithm(local=local)


def test_the_rehearsal_leaves_no_trace(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same records as without it, global generators where they were, and none for built-in methods."""
    config = small(method={"name": f"{HERE}:uses_global_generator"})
    before = torch.get_rng_state()
    run = api.start(config)
    assert torch.equal(torch.get_rng_state(), before)
    start = {name: tensor.clone() for name, tensor in run.state.weights.items()}
    run.check()
    assert all(torch.equal(run.state.weights[name], start[name]) for name in start)
    assert outcome(run.run()) == outcome(api.train(small()))
    monkeypatch.setattr(rehearsal, "_one_round", fails)
    api.start(small()).close()
    with pytest.raises(KeyError):
        api.start(config)
    assert all(find(name).trusted for name in RECIPES)


LATE = """
import feddumap

def late(broken: str = "{broken}") -> feddumap.Algorithm:
    def local(task, samples):
        if task.broadcast.round == 1 and "{broken}" == "local":
            raise ValueError("not\\nin round 1")
        return task.plan(task.model(), samples, feddumap.sgd())

    def apply(weights, steps, view):
        if view.state.round == 1 and "{broken}" == "apply":
            return weights
        return weights, steps, {{}}

    return feddumap.Algorithm(local=local, server=feddumap.ServerStep(lambda state: {{}}, apply))
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Write a user's module anew, with what is broken in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def to_file(broken: str) -> None:
        sys.modules.pop("late_module", None)
        (tmp_path / "late_module.py").write_text(LATE.format(broken=broken) + "\n" * len(broken))

    yield to_file
    sys.modules.pop("late_module", None)


@pytest.mark.parametrize(
    ("broken", "workers", "sentence"),
    [
        ("local", 1, r"its local failed at .*late_module.py:7 \(ValueError: not in round 1\): fix it"),
        ("local", 2, r"its local failed at .*late_module.py:7 \(ValueError: not in round 1\): fix it"),
        ("apply", 1, r"its server.apply returned a value of type dict: expected \(weights, steps, metrics\)"),
    ],
)
def test_a_mistake_that_shows_later_leaves_a_checkpoint(
    home: Path, tmp_path: Path, write: Callable[[str], None], broken: str, workers: int, sentence: str
) -> None:
    write(broken)
    config = small(method={"name": "late_module:late", "broken": "x"}, run={"workers": workers})
    run = api.start(config, tmp_path / "run")
    with pytest.raises(FeddumapError, match=sentence) as error:
        run.run()
    run.close()
    assert "\n" not in str(error.value)
    assert run.state.round == 1
    write("nothing")
    again = api.resume(tmp_path / "run")
    assert again.state.round == 1
    again.run().close()
    assert outcome(again) == outcome(api.train(config))


def test_the_traceback_on_request(
    home: Path, write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("local")
    monkeypatch.setenv("FEDDUMAP_TRACEBACK", "1")
    with pytest.raises(ValueError, match=re.escape("not\nin round 1")):
        api.train(small(method={"name": "late_module:late"}))


def test_errors_of_devices_are_not_blamed_on_the_server(home: Path) -> None:
    """An aggregate waits for devices: what goes wrong there is not its own failure."""

    def cohort_fails() -> Iterator[Any]:
        yield from ()
        raise RuntimeError("a worker failed")

    run = api.start(small(method={"name": f"{HERE}:not_finite"}))
    view: Any = RoundView(None, run.state, 0.1, [])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a worker failed"):
        run._algorithm.aggregate(cohort_fails(), view)
