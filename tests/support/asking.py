"""A method of a user's own that asks devices a question of its own: `tests.support.asking:asking`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from feddumap.core.algorithm import Algorithm, Cohort, Context, Metrics, at_round
from feddumap.core.messages import Answer, Broadcast, Question, ServerState
from feddumap.device.surveys import survey
from feddumap.device.task import Task
from feddumap.methods.fedavg import fedavg


def _fault(question: Question, broadcast: Broadcast, values: Mapping[str, Any]) -> str | None:
    good = values.keys() == {"brightness"} and 0 <= values["brightness"] <= 255
    return None if good else f"tells {dict(values)}, expected a brightness from 0 to 255"


@survey("brightness", fault=_fault)
def brightness(question: Question, task: Task) -> Answer:
    images = task.holdings.samples(task.device).inputs
    return Answer(task.device, {"brightness": float(images.float().mean())})


def _ask(state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
    devices = range(context.config.data.devices)
    question = Question("brightness")
    message = Broadcast(state.round, state.architecture, state.weights, 0.1)
    found = {
        answer.device: answer.values["brightness"] for answer in cohort.survey(question, message, devices)
    }
    return state, {"brightness": [found[device] for device in devices]}


def asking() -> Algorithm:
    """FedAvg that asks for the mean brightness of the devices' images in round 1."""
    return replace(fedavg(), reshape=at_round(1, _ask))
