"""Questions to devices: handler and answer schema are one entry, also for a user's own method."""

from __future__ import annotations

import numpy as np
import pytest

from feddumap import run as api
from feddumap.core.messages import Answer, Broadcast, Question
from feddumap.device.surveys import SURVEYS, answer
from feddumap.errors import FeddumapError
from feddumap.flower import replies
from feddumap.flower.codec import Refused
from tests.conftest import small

OWN = "tests.support.asking:asking"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_method_of_ones_own_asks_a_question_of_its_own(home: object, workers: int) -> None:
    run = api.train(small(method={"name": OWN}, run={"workers": workers}))
    images, split = run.dataset.train_inputs, run.split
    expected = [float(images[split.device(k)].mean()) for k in range(6)]
    np.testing.assert_allclose(run.records[1]["brightness"], expected, rtol=1e-5)
    assert "brightness" not in run.records[0]


def test_its_answers_are_checked_when_they_come_over_flower(home: object) -> None:
    run = api.start(small(method={"name": OWN}))
    message = Broadcast(1, run.state.architecture, run.state.weights, 0.1)
    question = Question("brightness")

    def read(value: float) -> Answer | Refused:
        content = replies.pack_answer(Answer(3, {"brightness": value}), 1)
        return replies.read_answer(content, question, message, 3)

    assert read(12.5) == Answer(3, {"brightness": 12.5})
    refused = read(300.0)
    assert isinstance(refused, Refused)
    assert "expected a brightness from 0 to 255" in refused.reason


def test_every_question_has_a_handler_and_a_schema() -> None:
    assert {"census", "rate", "ranks", "first-mask"} <= SURVEYS.keys()
    for survey in SURVEYS.values():
        assert callable(survey.handler)
        assert callable(survey.fault)


def test_an_unknown_question_is_an_error() -> None:
    with pytest.raises(FeddumapError, match=r"unknown question 'cencus': did you mean 'census'"):
        answer(Question("cencus"), None)  # type: ignore[arg-type]
