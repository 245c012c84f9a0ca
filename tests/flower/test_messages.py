"""Messages over Flower: all of them come back as they were sent, and nothing else gets in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from feddumap.config import Config
from feddumap.core.messages import CIFAR_INPUT, Answer, Broadcast, InputSpec, Question, Upload
from feddumap.core.tensors import digest
from feddumap.device.surveys import SURVEYS, Survey
from feddumap.flower import codec, handshake, replies, requests
from feddumap.flower.codec import Refused
from feddumap.flower.handshake import Hello
from feddumap.flower.requests import Request
from feddumap.models import architecture, initialise
from feddumap.training.samples import Samples

SHAPE = architecture("lenet", 10)
WEIGHTS = initialise(SHAPE, 1)
MASK = {"conv1.weight": torch.rand(WEIGHTS["conv1.weight"].shape) > 0.5}
EXTRA = {f"c/{name}": torch.randn_like(tensor) for name, tensor in WEIGHTS.items()}
MESSAGE = Broadcast(3, SHAPE, WEIGHTS, 0.05, extra=EXTRA, mask=MASK)
REQUEST = Request(
    "0123456789abcdef" * 2, 5, 3, 0.05, SHAPE, Config(), tuple(map(str, range(10))), Question("q", {"a": [1]})
)
UPLOAD = Upload(5, 3, 40, 8, WEIGHTS, EXTRA)
CENSUS = Question("census", {"labels": "counts"})
ANSWER = Answer(5, {"samples": 40, "counts": [4] * 10})

DTYPES = st.sampled_from(list(codec.DTYPES.values()))
SHAPES = st.lists(st.integers(0, 5), max_size=4)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=8), st.tuples(DTYPES, SHAPES, st.integers(0, 2**32)), max_size=4))
def test_any_tensors_come_back(recipe: dict[str, tuple[torch.dtype, list[int], int]]) -> None:
    tensors = {}
    for name, (dtype, shape, seed) in recipe.items():
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = np.random.default_rng(seed).integers(
            0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8
        )
        tensors[name] = (
            torch.from_numpy(raw).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
        )
    record = RecordDict({**codec.pack(x=tensors)})
    found = codec.unpack(record, "x", codec.exactly(codec.forms_of(tensors)))
    assert digest(found) == digest(tensors)
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_bytes_are_what_they_say() -> None:
    """Little-endian and row by row, in any layout of memory; booleans are bits."""
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3).t()
    flags = torch.tensor([True, False, True, True, False, False, False, False, True])
    record = codec.pack(x={"t": tensor, "b": flags})["x"]
    (array,) = record.values()
    assert (array.dtype, array.shape, array.stype) == ("uint8", (len(array.data),), codec.PACKED)
    size = int.from_bytes(array.data[:8], "little")
    assert json.loads(array.data[8 : 8 + size]) == [["t", "int32", [3, 2]], ["b", "bool", [9]]]
    numbers = b"".join(n.to_bytes(4, "little") for n in (0, 3, 1, 4, 2, 5))
    assert array.data[8 + size :] == numbers + bytes([0b10110000, 0b10000000])


def test_a_message_is_of_few_parts() -> None:
    """Flower makes several requests for each part, so that their number is what a round costs."""
    content = requests.pack_request(
        replace(REQUEST, question=None), requests.pack_broadcast(replace(MESSAGE, extra={}))
    )
    assert len(get_all_nested_objects(content)) <= 8  # a record each for request, weights and mask
    assert len(get_all_nested_objects(replies.pack_upload(replace(UPLOAD, extra={})))) <= 6


def test_a_request_comes_back() -> None:
    shared = Samples(torch.randint(0, 256, (7, 32, 32, 3), dtype=torch.uint8), torch.arange(7))
    content = requests.pack_request(REQUEST, requests.pack_broadcast(MESSAGE), shared)
    request = requests.read_request(content)
    assert request == REQUEST
    broadcast = requests.read_broadcast(content, REQUEST)
    assert isinstance(broadcast, Broadcast)
    assert (broadcast.round, broadcast.lr, broadcast.architecture) == (3, 0.05, SHAPE)
    for group in ("weights", "extra", "mask"):
        assert digest(getattr(broadcast, group)) == digest(getattr(MESSAGE, group))
    found = requests.read_shared(content, CIFAR_INPUT, 10)
    assert isinstance(found, Samples)
    assert torch.equal(found.inputs, shared.inputs)
    assert torch.equal(found.targets, shared.targets)
    plain = requests.pack_request(replace(REQUEST, question=None), requests.pack_broadcast(MESSAGE))
    assert requests.read_shared(plain, CIFAR_INPUT, 10) is None
    assert requests.read_request(plain) == replace(REQUEST, question=None)


def test_an_upload_comes_back() -> None:
    upload = replies.read_upload(replies.pack_upload(UPLOAD), MESSAGE, 5)
    assert isinstance(upload, Upload)
    assert (upload.device, upload.round, upload.samples, upload.steps) == (5, 3, 40, 8)
    assert upload.finite
    assert digest(upload.weights) == digest(WEIGHTS)
    assert digest(upload.extra) == digest(EXTRA)


def own_survey(monkeypatch: pytest.MonkeyPatch) -> Question:
    """A question of a user's method, whose answer may be anything."""
    survey = Survey(lambda question, task: Answer(task.device), lambda *_: None, None)
    monkeypatch.setitem(SURVEYS, "of my own", survey)
    return Question("of my own", {})


def test_answers_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replies.read_answer(replies.pack_answer(ANSWER, 3), CENSUS, MESSAGE, 5) == ANSWER
    question = own_survey(monkeypatch)
    answer = Answer(5, {"x": [1.5, None]}, {"t": torch.randn(3)})
    found = replies.read_answer(replies.pack_answer(answer, 3), question, MESSAGE, 5)
    assert isinstance(found, Answer)
    assert found.values == answer.values
    assert digest(found.tensors) == digest(answer.tensors)


def test_hellos_come_back() -> None:
    assert handshake.read_hello_request(handshake.pack_hello_request(REQUEST.token)) == REQUEST.token
    hello = Hello(4, True, False)
    assert handshake.read_hello(handshake.pack_hello(hello), 5) == hello
    refused = handshake.read_hello(handshake.pack_hello(hello), 4)
    assert isinstance(refused, Refused)
    assert "device is '4', expected a whole number from 0 to 3" in refused.reason


def record_of(header: Any, data: bytes, **array: Any) -> ArrayRecord:
    """Tensors as this header and these bytes have them."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + data
    parts = {"dtype": "uint8", "shape": (len(whole),), "stype": codec.PACKED, **array}
    return ArrayRecord({codec.NAME: Array(**parts, data=whole)})


def with_conv1(dtype: Any = "float32", shape: Any = None, cut: int = 0) -> Callable[[RecordDict], None]:
    """Weights whose header and bytes tell this of conv1.weight, which comes first."""
    forms = codec.forms_of(WEIGHTS)
    header = [[name, form.dtype, form.shape] for name, form in forms.items()]
    assert header[0][0] == "conv1.weight"
    header[0] = ["conv1.weight", dtype, FLOATS if shape is None else shape]
    (array,) = codec.pack(x=WEIGHTS)["x"].values()
    data = array.data[8 + int.from_bytes(array.data[:8], "little") :]
    return put("weights", record_of(header, data[cut:]))


def numbers_with(**values: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content["upload"] = ConfigRecord({**dict(content["upload"]), **values})

    return change


def without(key: str) -> Callable[[RecordDict], None]:
    return lambda content: content.__delitem__(key)


def put(key: str, value: Any) -> Callable[[RecordDict], None]:
    return lambda content: content.__setitem__(key, value)


FLOATS = (6, 3, 5, 5)  # of conv1.weight
BAD_UPLOADS = {
    "another shape": (with_conv1(shape=[6, 75]), "another form"),
    "another type": (with_conv1("int32"), "another form"),
    "a type of objects": (with_conv1("object"), "no known form"),
    "numpy's own bytes": (put("weights", ArrayRecord([np.zeros(FLOATS, np.float32)])), "are no tensors"),
    "too few bytes": (with_conv1(cut=4), "bytes where their header says"),
    "a huge shape": (with_conv1(shape=[2**39, 2**39]), "bytes where their header says"),
    "a negative shape": (with_conv1(shape=[-1, -450]), "no known form"),
    "a shape of truths": (with_conv1(shape=[True]), "no known form"),
    "a tensor more": (
        lambda content: content.update(codec.pack(weights={**WEIGHTS, "more": torch.zeros(0)})),
        "'more' and 0 other names differ",
    ),
    "a name twice": (put("weights", record_of([["a", "uint8", [1]]] * 2, b"xy")), "have a name twice"),
    "no header": (put("weights", record_of([], b"", shape=(3,))), "not those expected"),
    "a header of text": (put("weights", record_of("a", b"")), "is no list"),
    "a header that is none": (put("weights", record_of(b"[" * 99_999, b"")), "is not JSON"),
    "a header beyond the end": (
        put("weights", ArrayRecord({codec.NAME: Array("uint8", (8,), codec.PACKED, b"\xff" * 8)})),
        "no whole header",
    ),
    "half a length": (
        put("weights", ArrayRecord({codec.NAME: Array("uint8", (2,), codec.PACKED, b"xy")})),
        "no whole header",
    ),
    "two arrays": (
        put("weights", ArrayRecord({name: record_of([], b"")[codec.NAME] for name in (codec.NAME, "b")})),
        "are no tensors",
    ),
    "no weights": (without("weights"), "are not those expected"),
    "numbers for weights": (put("weights", ConfigRecord({"a": 1})), "are no tensors"),
    "no numbers": (without("upload"), "no record 'upload'"),
    "another device": (numbers_with(device=6), "it is of device 6"),
    "a stale round": (numbers_with(round=2), "it is of round 2, not of round 3"),
    "no samples": (numbers_with(samples=0), "its samples is '0'"),
    "too many samples": (
        numbers_with(samples=101),
        "its samples is '101', expected a whole number from 1 to 100",
    ),
    "samples as a truth": (numbers_with(samples=True), "its samples is 'True'"),
    "samples as text": (numbers_with(samples="40"), "its samples is '40'"),
    "steps before the first": (numbers_with(steps=-1), "its steps is '-1'"),
    "an extra without weights": (
        put("extra", codec.pack(x={"c/other": torch.zeros(3)})["x"]),
        "'c/other' is not like",
    ),
    "an extra of another shape": (
        put("extra", codec.pack(x={"c/fc3.bias": torch.zeros(3)})["x"]),
        "is not like",
    ),
    "too many extras": (
        put("extra", codec.pack(x={f"{i}/fc1.weight": WEIGHTS["fc1.weight"] for i in range(100)})["x"]),
        "more than 64 models",
    ),
    "a refusal": (put("refusal", ConfigRecord({"reason": "no\nspace"})), "it refused: no space"),
}


@pytest.mark.parametrize("name", BAD_UPLOADS)
def test_a_bad_upload_is_refused_before_it_is_unpacked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, reason = BAD_UPLOADS[name]
    content = replies.pack_upload(UPLOAD)
    change(content)
    made: list[str] = []
    original = codec._tensor
    monkeypatch.setattr(codec, "_tensor", lambda form, data: (made.append("x"), original(form, data))[1])
    found = replies.read_upload(content, MESSAGE, 5, most=100)
    assert isinstance(found, Refused), name
    assert reason in found.reason
    assert "weights" in name or "extra" in name or not made  # good weights may precede bad extras


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_models_that_diverged_are_refused(bad: float) -> None:
    weights = {**WEIGHTS, "fc3.bias": torch.full((10,), bad)}
    found = replies.read_upload(replies.pack_upload(replace(UPLOAD, weights=weights)), MESSAGE, 5)
    assert found == Refused("its model diverged (NaN or infinite)")
    extra = {**EXTRA, "c/fc3.bias": torch.full((10,), bad)}
    found = replies.read_upload(replies.pack_upload(replace(UPLOAD, extra=extra)), MESSAGE, 5)
    assert isinstance(found, Refused)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "expected ['counts', 'samples']"),
        ({"samples": 40}, "expected ['counts', 'samples']"),
        ({"samples": 40, "counts": [4] * 10, "secrets": 1}, "expected ['counts', 'samples']"),
        ({"samples": 40.0, "counts": [4] * 10}, "tells 40.0 samples"),
        ({"samples": 0, "counts": [0] * 10}, "tells 0 samples"),
        ({"samples": 40, "counts": [4] * 9}, "not 10 numbers"),
        ({"samples": 40, "counts": [4] * 9 + ["4"]}, "not 10 numbers"),
        ({"samples": 40, "counts": [44, -4, *[0] * 8]}, "do not add up"),
        ({"samples": 41, "counts": [4] * 10}, "do not add up"),
    ],
)
def test_bad_censuses_are_refused(values: dict[str, Any], reason: str) -> None:
    found = replies.read_answer(replies.pack_answer(Answer(5, values), 3), CENSUS, MESSAGE, 5)
    assert isinstance(found, Refused)
    assert reason in found.reason


BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "infinite": ({"values": MetricRecord({"a": float("inf")})}, "values are not finite ('a')"),
    "infinite in a list": ({"values": MetricRecord({"a": [1.0, float("nan")]})}, "values are not finite"),
    "texts": ({"values": ConfigRecord({"a": 1})}, "its values are not a record of metrics"),
    "twice": (
        {"values": MetricRecord({"a": 1}), "values-rest": ConfigRecord({"json": '{"a": 1}'})},
        "its values have a name twice",
    ),
    "infinite in JSON": ({"values-rest": ConfigRecord({"json": '{"a": Infinity}'})}, "not a JSON number"),
    "endless JSON": ({"values-rest": ConfigRecord({"json": "[" * 100_000})}, "not JSON"),
    "no object": ({"values-rest": ConfigRecord({"json": "[1]"})}, "not a JSON object"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_of_answers_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the question's own schema is."""
    records, reason = BAD_VALUES[name]
    content = replies.pack_answer(Answer(5), 3)
    content.update(records)
    found = replies.read_answer(content, own_survey(monkeypatch), MESSAGE, 5)
    assert isinstance(found, Refused)
    assert reason in found.reason


RATE = {"p": 0.3, "m": 3, "d": 10, "lipschitz": None, "lambda_min": -1.0, "lambda_max": 2.0, "clamped": False}


def test_other_bad_answers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(question: Question, answer: Answer) -> str:
        found = replies.read_answer(replies.pack_answer(answer, 3), question, MESSAGE, 5)
        return found.reason if isinstance(found, Refused) else "taken"

    rate = Question("rate", {"mode": "density", "max_rate": None})
    assert refused(rate, Answer(5, RATE)) == "taken"
    assert "pruning rate 1.5" in refused(rate, Answer(5, {**RATE, "p": 1.5}))
    assert "not numbers" in refused(rate, Answer(5, {**RATE, "lambda_min": "x"}))
    assert "expected" in refused(rate, Answer(5, {"p": 0.1}))
    assert "are not those expected" in refused(rate, Answer(5, RATE, {"t": torch.zeros(2)}))
    gradient = Question("census", {"labels": "gradient"})
    assert refused(gradient, Answer(5, {"samples": 4, "gradient": [-0.9, *[0.1] * 9]})) == "taken"
    assert "no labels have" in refused(gradient, Answer(5, {"samples": 4, "gradient": [0.9, *[-0.1] * 9]}))
    ranks = Question("ranks", {"layers": ["conv1"]})
    assert refused(ranks, Answer(5, {}, {"conv1": torch.zeros(6, dtype=torch.float64)})) == "taken"
    assert "another form" in refused(ranks, Answer(5, {}, {"conv1": torch.zeros(7, dtype=torch.float64)}))
    assert "not finite" in refused(ranks, Answer(5, {}, {"conv1": torch.full((6,), torch.nan).double()}))
    mask = Question("first-mask", {"weight": {"fc3.weight": 1.0}})
    bits = {"mask/fc3.weight": torch.zeros(105, dtype=torch.uint8)}
    dense = {f"weights/{name}": tensor for name, tensor in WEIGHTS.items()}
    assert refused(mask, Answer(5, {}, {**bits, **dense})) == "taken"
    assert "are not those expected" in refused(mask, Answer(5, {}, dense))
    large = Answer(5, {}, {"t": torch.zeros(10_000_000)})
    assert "unknown question 'of my own'" in refused(Question("of my own"), large)
    assert "more than" in refused(own_survey(monkeypatch), large)
    stale = replies.read_answer(replies.pack_answer(ANSWER, 2), CENSUS, MESSAGE, 5)
    assert stale == Refused("it is of round 2, not of round 3")


def request_with(**values: Any) -> RecordDict:
    content = requests.pack_request(REQUEST, requests.pack_broadcast(MESSAGE))
    content["order"] = ConfigRecord({**dict(content["order"]), **values})
    return content


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"token": "../../etc"}, "token is not 32 hexadecimal digits"),
        ({"token": 3}, "its token is missing, no text"),
        ({"device": -1}, "its device"),
        ({"lr": float("nan")}, "its lr"),
        ({"classes": []}, "its classes"),
        ({"classes": ["a"]}, "is not of 1 classes"),
        ({"architecture": "[]"}, "not a JSON object"),
        (
            {"architecture": json.dumps({**SHAPE.to_json(), "channels": {"conv1": "6"}})},
            "architecture is none",
        ),
        ({"config": "{"}, "config is not JSON"),
        ({"config": '{"train": {"rounds": "many"}}'}, "train.rounds = 'many'"),
    ],
)
def test_bad_requests_are_refused(values: dict[str, Any], reason: str) -> None:
    found = requests.read_request(request_with(**values))
    assert isinstance(found, Refused)
    assert reason in found.reason


def test_bad_broadcasts_are_refused() -> None:
    def refused(request: Request = REQUEST, **groups: Any) -> str:
        content = requests.pack_request(REQUEST, {**requests.pack_broadcast(MESSAGE), **groups})
        found = requests.read_broadcast(content, request)
        return found.reason if isinstance(found, Refused) else "taken"

    assert refused() == "taken"
    wide = replace(SHAPE, channels=(("conv1", 6), ("conv2", 10**9)))
    assert "wider than a lenet" in refused(replace(REQUEST, architecture=wide))
    assert "wider than" in refused(replace(REQUEST, architecture=replace(SHAPE, channels=(("other", 1),))))
    assert "needs the channels of" in refused(replace(REQUEST, architecture=replace(SHAPE, channels=())))
    assert "another form" in refused(**codec.pack(weights=initialise(architecture("lenet", 9), 1)))
    assert "not a mask" in refused(**codec.pack(mask={"conv1.weight": torch.zeros(FLOATS)}))
    assert "is not like" in refused(**codec.pack(extra={"v/conv1.weight": torch.zeros(3)}))
    assert "not finite" in refused(**codec.pack(extra={"v/fc3.bias": torch.full((10,), torch.inf)}))
    content = RecordDict(
        {**codec.pack(gift={"inputs": torch.zeros(2, 32, 32, 3), "labels": torch.arange(2)})}
    )
    found = requests.read_shared(content, CIFAR_INPUT, 10)
    assert isinstance(found, Refused)
    assert "not samples (image 3×32×32)" in found.reason


@pytest.mark.parametrize(
    ("given_input", "inputs", "labels", "reason"),
    [
        (
            CIFAR_INPUT,
            torch.zeros(2, 32, 32, 3, dtype=torch.uint8),
            [99, 0],
            "labels that are not from 0 to 9",
        ),
        (
            CIFAR_INPUT,
            torch.zeros(2, 32, 32, 3, dtype=torch.uint8),
            [-1, 0],
            "labels that are not from 0 to 9",
        ),
        (
            InputSpec("tokens", (2,), vocabulary=5),
            torch.tensor([[0, 5]]),
            [0],
            "tokens that are not from 0 to 4",
        ),
        (InputSpec("tokens", (2,), vocabulary=5), torch.tensor([[-1, 4]]), [0], "tokens that are not from 0"),
        (InputSpec("numbers", (2,)), torch.tensor([[0.0, torch.nan]]), [0], "not finite"),
    ],
)
def test_bad_shared_samples_are_refused(
    given_input: InputSpec, inputs: torch.Tensor, labels: list[int], reason: str
) -> None:
    content = RecordDict({**codec.pack(gift={"inputs": inputs, "labels": torch.tensor(labels)})})
    found = requests.read_shared(content, given_input, 10)
    assert isinstance(found, Refused)
    assert reason in found.reason
    sound = RecordDict(
        {**codec.pack(gift={"inputs": torch.zeros_like(inputs), "labels": torch.tensor([9] * len(labels))})}
    )
    assert isinstance(requests.read_shared(sound, given_input, 10), Samples)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"crop": 33}, "crop is 33"),
        ({"crop": 10**12}, "crop is"),
        ({"kind": "numbers", "crop": 1, "flip": False}, "crop is 1"),
        ({"kind": "numbers", "crop": 0, "flip": True}, "flip True"),
        ({"vocabulary": 5}, "vocabulary is 5"),
        ({"kind": "tokens", "shape": [4], "crop": 0, "flip": False}, "vocabulary is 0"),
        ({"kind": "tokens", "shape": [4], "crop": 0, "flip": False, "vocabulary": 2**31}, "vocabulary is"),
        ({"mean": [0.5], "std": [0.0]}, "std is not positive"),
        ({"mean": [0.5], "std": [-1.0]}, "std is not positive"),
        ({"mean": [0.5], "std": [float("inf")]}, "not finite"),
        ({"mean": [True], "std": [1.0]}, "not finite"),
        ({"mean": [0.5, 0.5], "std": [1.0, 1.0]}, "2 and 2 numbers"),
        ({"mean": [0.5]}, "1 and 0 numbers"),
    ],
)
def test_inputs_that_no_data_set_has_are_errors(changes: dict[str, Any], reason: str) -> None:
    """So a request with one is refused, before a network is built from it."""
    value = {**CIFAR_INPUT.to_json(), **changes}
    with pytest.raises(ValueError, match=reason):
        InputSpec.from_json(value)
    text = json.dumps({**SHAPE.to_json(), "input": value})
    found = requests.read_request(request_with(architecture=text))
    assert isinstance(found, Refused)


@pytest.mark.parametrize(
    "given_input",
    [
        CIFAR_INPUT,
        InputSpec("image", (1, 1, 5), crop=1, mean=(0.5,), std=(0.1,)),
        InputSpec("image", (3, 8, 8), mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3)),
        InputSpec("numbers", (7,), mean=(0.0,) * 7, std=(1.0,) * 7),
        InputSpec("tokens", (4,), vocabulary=257),
    ],
)
def test_inputs_come_back(given_input: InputSpec) -> None:
    assert InputSpec.from_json(json.loads(json.dumps(given_input.to_json()))) == given_input


@settings(max_examples=150)
@given(st.data())
def test_no_garbage_raises(data: st.DataObject) -> None:
    """Any records at all: read or refused, never an exception."""
    scalars = st.one_of(st.integers(-5, 2**62), st.floats(), st.text(max_size=9), st.booleans())
    configs = st.dictionaries(
        st.sampled_from(
            ["device", "round", "samples", "steps", "metrics", "values", "token", "own", "reason"]
        ),
        scalars,
    ).map(ConfigRecord)
    entries = st.lists(
        st.lists(st.one_of(st.sampled_from(["a", "bool", "float32"]), st.lists(st.integers(-3, 9)))),
        max_size=3,
    )
    headers = st.builds(
        lambda entries, data: len(text := json.dumps(entries).encode()).to_bytes(8, "little") + text + data,
        entries,
        st.binary(max_size=16),
    )
    arrays = st.builds(
        Array,
        st.sampled_from(["uint8", "bool", "x"]),
        st.lists(st.integers(-3, 2**63), max_size=10).map(tuple),
        st.sampled_from([codec.PACKED, "numpy.ndarray"]),
        st.one_of(st.binary(max_size=16), headers),
    )
    records = st.dictionaries(st.sampled_from([codec.NAME, "b"]), arrays, max_size=2).map(ArrayRecord)
    keys = st.sampled_from(
        ["upload", "answer", "weights", "extra", "tensors", "order", "hello", "refusal", "who", "values"]
    )
    content = RecordDict(data.draw(st.dictionaries(keys, st.one_of(configs, records))))
    for read in (
        lambda: replies.read_upload(content, MESSAGE, 5),
        lambda: replies.read_answer(content, CENSUS, MESSAGE, 5),
        lambda: requests.read_request(content),
        lambda: requests.read_broadcast(content, REQUEST),
        lambda: handshake.read_hello(content, 10),
        lambda: handshake.read_hello_request(content),
    ):
        found = read()
        assert isinstance(found, (Refused, Hello, str))
