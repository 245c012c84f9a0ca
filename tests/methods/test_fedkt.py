"""FedKT: votes, parties, the one round, and its form with many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from feddumap import run as api
from feddumap.config import Config
from feddumap.core.messages import Tensors
from feddumap.core.rng import stream
from feddumap.core.sampling import select
from feddumap.core.tensors import digest
from feddumap.methods.fedkt import (
    BATCH,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Training,
    add_votes,
    passes,
    plurality,
)
from feddumap.models import architecture, initialise, network
from feddumap.system.determinism import deterministic
from feddumap.training.backends import Kernels
from feddumap.training.loop import fit
from feddumap.training.model import Model
from feddumap.training.optimizers import adam
from feddumap.training.samples import Samples, batches
from tests.conftest import both_kernels, small
from tests.support.oracles import averaged, samples, taken, walk

FULL = 15_626  # LeNet's parameters
DEVICES, PARTITIONS, SUBSETS, EPOCHS = 3, 2, 3, 2


def config(name: str = "fedkt", **keys: Any) -> Config:
    own = {"vote_epochs": EPOCHS} if name == "fedkt" else {}
    method = {"name": name, "partitions": PARTITIONS, "subsets": SUBSETS, **own, **keys}
    data = {
        "devices": DEVICES,
        "partition": "iid",
        "size_spread": 0.5,
        "server_classes": 10,
        "augment": False,
    }
    return small(method=method, data=data, train={"rounds": 2, "cohort": 2})


def winner(votes: Sequence[int], classes: int) -> int:
    """Most votes; of equals the lowest class, which is 0 where nobody voted."""
    return max(range(classes), key=lambda kind: (list(votes).count(kind), -kind))


ballots = st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=5)


@settings(max_examples=100)
@given(ballots)
def test_a_plurality_and_the_lowest_class_of_equals(given_: list[list[int]]) -> None:
    got = plurality([np.array(ballot) for ballot in given_], 4)
    assert got.tolist() == [winner(votes, 4) for votes in zip(*given_, strict=True)]


@settings(max_examples=100)
@given(st.lists(ballots, min_size=1, max_size=5))
def test_a_party_counts_only_where_its_students_agree(parties: list[list[list[int]]]) -> None:
    votes = np.zeros((6, 4), dtype=np.int64)
    for students in parties:
        add_votes(votes, [np.array(ballot) for ballot in students])
    for image in range(6):
        said = [{ballot[image] for ballot in students} for students in parties]
        agreed = [opinion.pop() for opinion in said if len(opinion) == 1]
        assert votes[image].tolist() == [agreed.count(kind) for kind in range(4)]


@dataclass
class Lesson:
    """A call of Training.train: what it began from, learnt and became."""

    data: Samples
    first: str
    trained: Tensors
    steps: int


@contextmanager
def listening() -> Iterator[list[Lesson]]:
    """All lessons that are given in this process, in order."""
    heard: list[Lesson] = []
    firsts: list[str] = []
    plain_train, plain_fit = Training.train, fit

    def first(model: Model, *rest: Any) -> int:
        firsts.append(digest(model.weights()))
        return plain_fit(model, *rest)

    def train(self: Training, start: Any, data: Samples, *rest: Any) -> tuple[Model, int]:
        model, steps = plain_train(self, start, data, *rest)
        heard.append(Lesson(data, firsts[-1], model.weights(), steps))
        return model, steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("feddumap.methods.fedkt"), "fit", first)
        patch.setattr(Training, "train", train)
        yield heard


@cache
def one_shot() -> tuple[api.Run, list[Lesson]]:
    """The one round, and its lessons."""
    with listening() as lessons:
        return api.train(config().replace(train={"rounds": 30})), lessons


def ask(run: api.Run, lesson: Lesson) -> list[int]:
    """What a network sees in the server's images, in double precision."""
    images = taken(run, run.split.server).inputs.permute(0, 3, 1, 2).double() / 255
    with torch.no_grad():
        outputs: torch.Tensor = network(run.state.architecture, lesson.trained).double()(images)
    return outputs.argmax(1).tolist()


def agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """All but what a rounding may decide."""
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) <= 1


def content(data: Samples) -> Counter[tuple[bytes, int]]:
    pairs = zip(data.inputs, data.targets, strict=True)
    return Counter((image.numpy().tobytes(), int(label)) for image, label in pairs)


def check_round(run: api.Run, lessons: list[Lesson], chosen: Sequence[int]) -> tuple[list[int], list[Lesson]]:
    """One round's lessons against the description; the elected labels, and the students."""
    public = taken(run, run.split.server)
    assert len(lessons) == len(chosen) * PARTITIONS * (SUBSETS + 1) + 1
    order = iter(lessons)
    students, votes = [], []
    for device in chosen:
        own, own_students = taken(run, run.split.device(device)), []
        divisions = []
        for _ in range(PARTITIONS):
            teachers = [next(order) for _ in range(SUBSETS)]
            parts = [content(teacher.data) for teacher in teachers]
            assert sum(parts, Counter()) == content(own)  # disjoint, and all of it
            sizes = [len(teacher.data) for teacher in teachers]
            assert max(sizes) - min(sizes) <= 1
            divisions.append(parts)
            student = next(order)
            assert torch.equal(student.data.inputs, public.inputs)
            elected = [winner(said, 10) for said in zip(*(ask(run, t) for t in teachers), strict=True)]
            assert agree(student.data.targets.tolist(), elected)
            own_students.append(student)
        assert divisions[0] != divisions[1]
        students += own_students
        votes.append(list(zip(*(ask(run, student) for student in own_students), strict=True)))
    final = next(order)
    agreed = [[opinion[0] for opinion in said if len(set(opinion)) == 1] for said in zip(*votes, strict=True)]
    labels = final.data.targets.tolist()
    assert torch.equal(final.data.inputs, public.inputs)
    assert agree(labels, [winner(said, 10) for said in agreed])
    record = run.records[-1]
    right = int((final.data.targets == public.targets).sum())
    assert record["vote_accuracy"] == pytest.approx(right / len(public))
    assert abs(record["unelected"] - agreed.count([])) <= 1
    return labels, students


def test_one_round_of_fresh_teachers_and_students(home: object) -> None:
    run, lessons = one_shot()
    assert run.finished
    assert (run.config.train.rounds, run.rounds, len(run.records), run.state.round) == (30, 1, 1, 1)
    assert run.records[0]["devices"] == list(range(DEVICES))  # whatever train.cohort says
    labels, students = check_round(run, lessons, range(DEVICES))
    assert len(set(labels)) > 1
    assert 0 < run.records[0]["unelected"] < len(labels)
    begun = digest(api.start(run.config).state.weights)
    assert len({lesson.first for lesson in lessons} | {begun}) == len(lessons) + 1  # each fresh, and its own
    assert digest(run.state.weights) == digest(lessons[-1].trained)
    assert [lesson.steps for lesson in lessons] == [EPOCHS * -(-len(x.data) // 64) for x in lessons]
    assert len({digest(student.trained) for student in students}) == DEVICES * PARTITIONS


def test_bytes_and_clock_of_the_one_round(home: object) -> None:
    run, _ = one_shot()
    public, model = len(run.split.server), 4 * FULL
    gift = DEVICES * 257 * public  # the images go down once, with a byte for the label
    (record,) = run.records
    assert record["bytes_up"] == DEVICES * PARTITIONS * model
    assert record["bytes_down"] == DEVICES * model + gift

    def seconds(epochs: int, nbytes: int) -> float:
        """Twice: so many epochs over the device's and the public images, and three teachers' answers."""
        passed = sum(2 * (epochs * (int(n) + public) + 3 * public / 3) for n in run.split.sizes)
        return float(1.3 * passed / run.split.sizes.sum() + nbytes / 2 / 2**20 * (1 / 6.25 + 1 / 12.5))

    wire = DEVICES * (1 + PARTITIONS) * model
    assert record["clock"] == pytest.approx(seconds(EPOCHS, wire))
    charged = api.train(config(vote_epochs=1, transfer_on_clock=True))
    assert charged.records[0]["clock"] == pytest.approx(seconds(1, wire + gift))


def test_passes_by_hand() -> None:
    """One partition and subset: 3 · (5 + 7) learnt, and 7 answers of a third of a step, rounded up."""
    got = passes(1, 1, Training(3), np.array([5, 8]), 7, small())
    assert got.tolist() == [36 + 3, 45 + 3]
    assert passes(2, 5, Training(), np.array([5]), 6, small(train={"epochs": 4})).tolist() == [
        2 * 4 * 11 + 20
    ]


def test_the_servers_labels_teach_nothing(home: object) -> None:
    expected, other = one_shot()[0], api.start(config())
    labels = np.array(other.dataset.train_labels)
    labels[other.split.server] = (labels[other.split.server] + 1) % 10
    other.dataset = replace(other.dataset, train_labels=labels)
    other.run()
    assert digest(other.state.weights) == digest(expected.state.weights)
    assert other.records[0]["vote_accuracy"] != expected.records[0]["vote_accuracy"]


def test_the_rounds_of_the_iterated_form(home: object) -> None:
    """All begin from w; the final model from the students' mean, and learns E epochs of SGD (in float64)."""
    run = api.start(config("fedkt-iter").replace(train={"epochs": 2}))
    rounds = iter(run)
    for number in range(2):
        before, chosen = run.state.weights, select(run.config, number)
        with listening() as lessons:
            next(rounds)
        labels, students = check_round(run, lessons, chosen)
        assert {lesson.first for lesson in lessons[:-1]} == {digest(before)}
        sizes = [len(run.split.device(device)) for device in chosen for _ in range(PARTITIONS)]
        assert len(set(sizes)) > 1
        mean = averaged(sizes, [{k: t.double() for k, t in s.trained.items()} for s in students])
        assert lessons[-1].first == digest({name: tensor.float() for name, tensor in mean.items()})
        public = Samples(taken(run, run.split.server).inputs, torch.tensor(labels))
        expected = walk(run, mean, public, stream(777, "elected", number), number, lambda _, grad: grad)
        for name, tensor in run.state.weights.items():
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-4, atol=2e-6)
        record = run.records[number]
        assert record["devices"] == chosen
        assert record["bytes_up"] == 2 * PARTITIONS * 4 * FULL
        assert record["bytes_down"] == 2 * 4 * FULL + (number == 0) * DEVICES * 257 * len(public)


def test_a_device_with_fewer_images_than_subsets(home: object) -> None:
    data = {"devices": 400, "size_spread": 0.0}  # two or three images each
    with listening() as lessons:
        run = api.train(config("fedkt-iter", subsets=7).replace(data=data, train={"rounds": 1}))
    taught = [len(lesson.data) for lesson in lessons if len(lesson.data) < len(run.split.server)]
    images = sum(len(run.split.device(device)) for device in select(run.config, 0))
    assert taught == [1] * PARTITIONS * images
    assert images < 2 * 7
    assert run.records[0]["accuracy"] is not None


def test_adam_with_decay_equals_torchs() -> None:
    shape = architecture("lenet", 10)
    trained, oracle, plain = (network(shape, initialise(shape, 3)).double() for _ in range(3))

    def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(x.double(), y) for x, y in batches(samples(60), 2, 8, stream(1, "b"), augment=None)]

    fit(trained, data(), adam(weight_decay=1e-5), 1e-3, F.cross_entropy)
    fit(plain, data(), adam(), 1e-3, F.cross_entropy)
    optimiser = torch.optim.Adam(oracle.parameters(), lr=1e-3, weight_decay=1e-5)
    for inputs, labels in data():
        optimiser.zero_grad()
        F.cross_entropy(oracle(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, oracle.state_dict()[name], rtol=1e-7, atol=1e-10)
    other, expected = (model.state_dict()["fc1.weight"] for model in (plain, oracle))
    assert not torch.allclose(other, expected, rtol=1e-7, atol=1e-10)


@both_kernels
def test_a_lesson_is_adams(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """Fresh weights and batches of 64 in its own order; with a decay that float32 can show."""
    assert (LEARNING_RATE, WEIGHT_DECAY, BATCH) == (1e-3, 1e-5, 64)
    monkeypatch.setattr(import_module("feddumap.methods.fedkt"), "WEIGHT_DECAY", 0.1)
    shape, data = architecture("lenet", 10), samples(150)
    start, settings = (shape, initialise(shape, 3)), config().replace(train={"kernels": kernels})
    with deterministic():
        model, steps = Training(2).train(start, data, 0.5, settings, stream(1, "a"))
    rng = stream(1, "a")
    oracle = network(shape, initialise(shape, int(rng.integers(2**31)))).double()
    optimiser = torch.optim.Adam(oracle.parameters(), lr=1e-3, weight_decay=0.1)
    for inputs, labels in batches(data, 2, 64, rng, augment=None):
        optimiser.zero_grad()
        F.cross_entropy(oracle(inputs.double()), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert steps == 2 * 3
    for name, tensor in model.weights().items():
        torch.testing.assert_close(tensor.double(), oracle.state_dict()[name], rtol=1e-4, atol=1e-5)
