"""Clipping, noise and what is released of devices, against float64 oracles; and which methods go with it."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.algorithm import (
    Algorithm,
    Census,
    Cohort,
    Context,
    Merged,
    RoundView,
    at_round,
    mean_of_uploads,
)
from feddumap.core.messages import Answer, Question, ServerState, Tensors, Upload
from feddumap.core.sampling import select
from feddumap.engine.rounds import broadcast_of
from feddumap.errors import FeddumapError
from feddumap.methods import compose
from feddumap.methods.fedavg import fedavg
from feddumap.models import architecture
from feddumap.runs.inspect import describe
from feddumap.runs.privacy import statement
from feddumap.screening import of
from feddumap.screening.accounting import Releases
from feddumap.screening.privacy import LABEL_SHARE, PrivateCohort, PrivateRound
from tests.support.methods import NAMES, bits, config_of, outcome, resumed

PRIVATE: dict[str, Any] = {"clip": 0.5, "noise": 1.0, "delta": 1e-5, "secret": False, "label_clip": 50.0}
WEIGHTS = {"a": torch.tensor([1.0, -2.0, 0.5]), "b": torch.tensor([[0.25, 4.0]]), "count": torch.tensor(7)}


def private(name: str = "fedavg", privacy: dict[str, Any] | None = None, **sections: Any) -> Config:
    return config_of(name, privacy={**PRIVATE, **(privacy or {})}, **sections)


def sent(values: dict[int, float], config: Config, **extra: float) -> list[Upload]:
    """Uploads whose every number is the broadcast's plus a value of the device's."""
    return [
        Upload(
            device, 0, 10 * device + 1, 3,
            {
                name: tensor + value if tensor.is_floating_point() else tensor + device
                for name, tensor in WEIGHTS.items()
            },
            {f"v/{name}": torch.full_like(WEIGHTS[name], number) for name, number in extra.items()},
        )
        for device, value in values.items()
    ]  # fmt: skip


def round_of(
    config: Config,
    algorithm: Algorithm | None = None,
    number: int = 0,
    secret: int | None = None,
    labels: np.ndarray | None = None,
    **state: Tensors,
) -> tuple[PrivateRound, RoundView]:
    shape = architecture("lenet", 10)
    census = Census(np.arange(20) + 1, labels)
    context = Context(config, None, census, None, secret=secret)  # type: ignore[arg-type]
    view = RoundView(context, ServerState(number, shape, dict(WEIGHTS), **state), 0.1, [])
    begun = of(config, algorithm or fedavg(), known=True).begin({}, view)
    assert isinstance(begun, PrivateRound)
    return begun, replace(view, combine=begun.combine)


def merged(uploads: Iterable[Upload], begun: tuple[PrivateRound, RoundView]) -> Merged:
    return mean_of_uploads(begun[0].admit(uploads), begun[1])


def noise_of(config: Config, **given: Any) -> Tensors:
    """The noise that a round adds: what a round without uploads does to the weights."""
    nothing = merged([], round_of(config, **given)).weights
    return {name: tensor.double() - WEIGHTS[name].double() for name, tensor in nothing.items()}


def test_clipping_and_the_fixed_divisor_against_an_oracle() -> None:
    """Each device counts the same whatever its samples, and three of an expected two are divided by two."""
    config = private()
    values = {3: 0.01, 4: -3.0, 9: 1000.0}
    found = merged(sent(values, config), round_of(config)).weights
    noise = noise_of(config)
    total = 0.0
    for value in values.values():
        norm = math.sqrt(5) * abs(value)
        total += value * min(1.0, 0.5 / norm)
    for name in ("a", "b"):
        expected = WEIGHTS[name].double() + total / config.train.cohort + noise[name]
        assert torch.allclose(found[name].double(), expected, rtol=0, atol=1e-6)
        assert found[name].dtype == WEIGHTS[name].dtype
    assert int(found["count"]) == 7  # it would tell of a device's steps


def test_what_comes_along_is_clipped_with_the_model() -> None:
    config = private("fedda")
    algorithm = replace(fedavg(), send=lambda state: {"v/a": torch.full((3,), 9.0)})
    begun = round_of(config, algorithm)
    made = merged(sent({5: 2.0}, config, a=4.0), begun)
    factor = 0.5 / math.sqrt(5 * 2.0**2 + 3 * 4.0**2)
    silent = merged([], round_of(config, algorithm))
    difference = {name: made.weights[name] - silent.weights[name] for name in ("a", "b")}
    assert torch.allclose(difference["b"], torch.full((1, 2), 2.0 * factor / 2), atol=1e-6)
    assert torch.allclose(
        made.extra["v/a"] - silent.extra["v/a"], torch.full((3,), 4.0 * factor / 2), atol=1e-6
    )
    assert begun[0].end()[1]["clipped_uploads"] == 1
    with pytest.raises(FeddumapError, match=r"uploads carry 'v/b', which broadcasts do not"):
        merged(sent({5: 2.0}, config, b=1.0), round_of(config, algorithm))


def test_the_variance_of_the_noise() -> None:
    """σ = z S on the sum, so z S / (expected number) on the mean; also where nobody joined."""
    config = private(privacy={"clip": 3.0, "noise": 2.0})
    size = 20_000
    shape = architecture("lenet", 10)
    context = Context(config, None, Census(np.ones(20)), None)  # type: ignore[arg-type]
    view = RoundView(context, ServerState(0, shape, {"w": torch.zeros(size, dtype=torch.float64)}), 0.1, [])
    begun = of(config, fedavg(), known=True).begin({}, view)
    made = mean_of_uploads(begun.admit([]), replace(view, combine=begun.combine)).weights["w"]
    expected = 2.0 * 3.0 / config.train.cohort
    assert float(made.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * size))
    assert abs(float(made.mean())) < 4 * expected / math.sqrt(size)
    assert float((made.abs() < expected).double().mean()) == pytest.approx(math.erf(2**-0.5), abs=0.02)


def test_noise_depends_on_seed_round_and_secret() -> None:
    config = private()
    first = noise_of(config)["a"]
    assert torch.equal(first, noise_of(config)["a"])
    others = [
        noise_of(config, number=1),
        noise_of(config, secret=12345),
        noise_of(config.replace(run={"seed": 1})),
    ]
    assert all(not torch.equal(first, other["a"]) for other in others)
    assert torch.equal(
        noise_of(config, secret=5)["a"], noise_of(config.replace(run={"seed": 1}), secret=5)["a"]
    )


def test_a_mask_is_kept() -> None:
    config = private()
    mask = {"a": torch.tensor([True, False, True])}
    noise = noise_of(config, mask=mask)["a"]
    assert (noise != 0).tolist() == [True, False, True]


def test_label_counts_are_released_as_noisy_sums() -> None:
    """Server steps see one device for the round's and one for all others, and neither receipts nor census."""
    counts = np.zeros((20, 10))
    counts[:, 0], counts[4] = 3.0, np.arange(10) * 100.0
    config = private("feddu", privacy={"noise": 1e-9})
    algorithm = compose(config)
    begun, view = round_of(config, algorithm, labels=counts)
    list(begun.admit(sent({2: 0.1, 4: 0.1}, config)))
    seen = begun.disclose(view)
    clipped = counts[2] + counts[4] * 50.0 / np.linalg.norm(counts[4])
    labels = seen.context.census.labels
    assert labels is not None
    assert labels[0] == pytest.approx(clipped, abs=1e-4)
    assert labels.sum(axis=0) == pytest.approx(clipped * 20 / 2, abs=1e-3)  # the sample stands for all
    assert [receipt.device for receipt in seen.receipts] == [0]
    assert seen.receipts[0].samples == round(clipped.sum())


def test_the_noise_of_label_counts_has_its_share_of_the_budget() -> None:
    """1/z² of the round is 1/z² of the model and 1/z² of the label counts: a joint Gaussian mechanism."""
    config = private("feddu", privacy={"noise": 2.0, "label_clip": 7.0})
    algorithm, noise = compose(config), []
    for number in range(300):
        begun, view = round_of(config, algorithm, number, labels=np.zeros((20, 10)))
        begun.disclose(view)
        noise.append(begun.end()[0]["labels"].numpy())
    z_labels = float(np.std(noise)) / 7.0
    joint = (1 / 2.0**2 + 1 / z_labels**2) ** -0.5
    assert joint == pytest.approx(2.0 * math.sqrt(1 - LABEL_SHARE), rel=0.02)


def test_without_labels_the_census_is_the_number_of_devices() -> None:
    begun, view = round_of(private())
    seen = begun.disclose(view)
    assert seen.context.census.samples.tolist() == [2, 18]
    assert (seen.receipts[0].samples, seen.context.census.labels) == (2, None)


class Rates:
    """Devices that answer with given rates."""

    def __init__(self, *rates: float) -> None:
        self.rates = rates

    def survey(self, question: Question, broadcast: Any, devices: Iterable[int]) -> Iterator[Answer]:
        return (Answer(device, {"p": self.rates[device]}) for device in devices)


def test_of_pruning_rates_only_their_mean_is_told() -> None:
    config = private("fedap", privacy={"rate_noise": 1e-9}, data={"devices": 3})
    context = Context(config, None, Census(np.ones(3)), None)  # type: ignore[arg-type]
    state = ServerState(4, architecture("lenet", 10), dict(WEIGHTS))
    message = broadcast_of(state, config)
    cohort = PrivateCohort(Rates(0.2, 0.9, 0.4), context)  # type: ignore[arg-type]
    (answer,) = cohort.survey(Question("rate"), message, range(3))
    assert answer.values == {"p": pytest.approx(0.5, abs=1e-6)}
    loud = replace(context, config=config.replace(privacy={"rate_noise": 1.0}))
    draws = []
    for number in range(400):
        cohort = PrivateCohort(Rates(0.5, 0.5, 0.5), loud)  # type: ignore[arg-type]
        (answer,) = cohort.survey(Question("rate"), replace(message, round=number), range(3))
        draws.append(answer.values["p"])
    inside = [p for p in draws if 0 < p < 1]
    assert len(inside) / len(draws) == pytest.approx(math.erf(1.5 / math.sqrt(2)), abs=0.05)  # |noise| < 1.5
    with pytest.raises(FeddumapError, match="devices are not asked 'ranks'"):
        list(cohort.survey(Question("ranks"), message, [0]))


# which methods

REFUSED = {"feddf", "fedkt", "fedkt-iter", "hybrid-fl", "prunefl"}


QUICK = {"fedavg", "feddumap", "scaffold", *REFUSED}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_every_method_trains_or_is_refused(home: object, name: str) -> None:
    config = private(name, privacy={"noise": 0.01}, train={"rounds": 2}, run={"evaluate_every": 2})
    if name in REFUSED:
        with pytest.raises(FeddumapError, match=rf"method\.name = '{name}' cannot go with \[privacy\]: .*;"):
            api.start(config)
        return
    run = api.train(config)
    epsilons = [record["epsilon"] for record in run.records]
    assert len(epsilons) == 2
    assert 0 < epsilons[0] < epsilons[1]
    assert bits(run) != bits(api.start(config))


def keep(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, dict[str, Any]]:
    return state, {}


def peeking(uploads: Iterable[Upload], view: RoundView) -> Merged:
    return mean_of_uploads(uploads, view)


def test_methods_of_ones_own() -> None:
    for name in ("mine:plain", "of-another-package"):
        plain = private().replace(method={"name": name})
        assert of(plain, fedavg(), known=False).empty_rounds
        with pytest.raises(FeddumapError, match=rf"'{name}' cannot go with .* single uploads"):
            of(plain, replace(fedavg(), aggregate=peeking), known=False)
        for asks in (replace(fedavg(), labels="counts"), replace(fedavg(), reshape=at_round(3, keep))):
            with pytest.raises(FeddumapError, match="asks devices for more than their uploads"):
                of(plain, asks, known=False)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": {"rate": "density", "rate_nodes": "selected"}}, "tells who was selected"),
        ({"data": {"server_fraction": 0.0}}, "a single device ranks its units"),
    ],
)
def test_settings_that_would_tell_of_single_devices(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(FeddumapError, match=message):
        compose(private("fedap", **sections))


def test_robust_aggregation_is_refused() -> None:
    config = SimpleNamespace(privacy=SimpleNamespace(on=True), aggregate=SimpleNamespace(name="median"))
    with pytest.raises(FeddumapError, match=r"aggregate\.name = 'median' cannot go with \[privacy\]"):
        of(config, fedavg(), known=True)  # type: ignore[arg-type]


# configuration


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"clip": 1.0}, r"set privacy\.noise, or privacy\.epsilon"),
        ({"noise": 1.0}, r"set privacy\.clip"),
        ({"clip": 0.0, "noise": 1.0}, r"privacy\.clip = 0\.0"),
    ],
)
def test_incomplete_sections(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(FeddumapError, match=message):
        Config.parse({"privacy": keys})


def test_a_delta_that_is_too_large(home: object) -> None:
    with pytest.raises(FeddumapError, match=r"privacy\.delta = 0\.1: expected less than 1/data\.devices"):
        api.start(private(privacy={"delta": 0.1}))


def test_a_target_chooses_the_noise(home: object, tmp_path: Path) -> None:
    config = private(train={"rounds": 2, "cohort": 4}, run={"evaluate_every": 2})
    config = Config.parse({**config.model_dump(exclude_unset=True), "privacy": {"clip": 0.5, "epsilon": 5.0}})
    notes: list[str] = []
    with api.start(config, tmp_path / "run", notes.append) as run:
        run.run()
    assert run.config.privacy.delta == 1e-5
    assert 4.95 <= run.records[-1]["epsilon"] <= 5.0
    assert run.config.privacy.noise is not None
    expected = Releases(20, 4, "poisson", run.config.privacy.noise).epsilon(1, 1e-5)
    assert run.records[0]["epsilon"] == expected
    assert any("ε = 5" in note and "after 2 rounds" in note for note in notes)
    # the same run is found again, and one that goes on longer is told to be above its target
    assert api.begin(config, tmp_path / "run").finished
    with api.resume(tmp_path / "run", rounds=3, say=notes.append) as again:
        again.run()
    assert any("above privacy.epsilon = 5" in note for note in notes)
    told = describe(tmp_path / "run")["privacy"]
    assert told["epsilon"] == again.records[-1]["epsilon"] > 5.0
    assert "one device's whole data, added or removed" in statement(told)
    assert "above the target" in statement(told)
    with pytest.raises(FeddumapError, match=r"privacy\.noise = .* more than privacy\.epsilon = 5"):
        api.start(run.config.replace(train={"rounds": 3}))


# runs


@pytest.mark.slow
def test_workers_and_resume_change_no_bit(home: object, tmp_path: Path) -> None:
    config = private("feddum", train={"cohort": 4})
    expected = api.train(config)
    _, again = resumed(config.replace(run={"workers": 2}), tmp_path / "run", 2)
    assert outcome(again) == outcome(expected)


def test_a_secret_is_kept_for_the_owner_and_resumed_from(home: object, tmp_path: Path) -> None:
    config = private(privacy={"secret": True})
    one, other = tmp_path / "one", tmp_path / "other"
    _, again = resumed(config, one, 1)
    key = one / "privacy.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    run = api.start(config, other)
    (other / "privacy.key").write_text(key.read_text())
    run.run().close()
    assert outcome(run) == outcome(again)  # the key is all that they share besides the configuration
    assert bits(api.train(config)) != bits(run)
    key.unlink()
    with api.resume(one, rounds=4) as lost, pytest.raises(FeddumapError, match=r"privacy\.key is missing"):
        lost.run()


def test_poisson_cohorts_vary_and_may_be_empty(home: object) -> None:
    config = private(train={"cohort": 1, "rounds": 3}, run={"evaluate_every": 3})
    sizes = [len(select(config, number)) for number in range(2000)]
    assert np.mean(sizes) == pytest.approx(1.0, abs=0.1)
    assert np.var(sizes) == pytest.approx(20 * 0.05 * 0.95, abs=0.15)
    fixed = config.replace(privacy={"sampling": "fixed"})
    assert {len(select(fixed, number)) for number in range(50)} == {1}
    assert select(config, 3) != select(config, 3, secret=99) or select(config, 4) != select(
        config, 4, secret=99
    )
    seed = next(
        seed for seed in range(99) if [] in [select(config.replace(run={"seed": seed}), n) for n in range(3)]
    )
    run = api.start(config.replace(run={"seed": seed}))
    before = run.state.weights
    for _ in run:
        moved = any(not torch.equal(before[name], tensor) for name, tensor in run.state.weights.items())
        assert moved  # by noise alone where nobody joined, so that it does not tell
        before = run.state.weights
    assert any(record.devices == [] for record in run.records)


def test_privacy_over_flower(home: object, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    from functools import partial

    from feddumap.flower import server
    from tests.support.flower import DEVICES, alike
    from tests.support.flower import config_of as over_flower
    from tests.support.flower_grid import FakeGrid

    sections: dict[str, Any] = {"train": {"rounds": 2, "cohort": 2}, "privacy": PRIVATE}
    expected = api.train(over_flower("feddum", "local", **sections))
    run = api.start(over_flower("feddum", **sections))
    run.engine = partial(server.cohort, FakeGrid.of(DEVICES, state=str(tmp_path)))
    alike(run.run(), expected)
    assert "epsilon" in run.records[-1]
