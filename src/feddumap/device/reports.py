"""What a device answers when it is asked without training. Nothing else about its data leaves it."""

from collections.abc import Callable, Mapping

import numpy as np

from feddumap.device.task import Task
from feddumap.errors import unknown
from feddumap.types import Answer, Question


def census(question: Question, task: Task) -> Answer:
    """The number of samples and, only if asked with `labels`, how many there are of each class."""
    labels = task.holdings.labels(task.device)
    values: dict[str, object] = {"samples": len(labels)}
    if question.settings.get("labels"):
        classes = task.broadcast.architecture.classes
        values["labels"] = np.bincount(labels, minlength=classes).tolist()
    return Answer(task.device, values)


REPORTS: Mapping[str, Callable[[Question, Task], Answer]] = {"census": census}


def answer(question: Question, task: Task) -> Answer:
    """Look the question up and answer it."""
    if question.name not in REPORTS:
        raise unknown("question", question.name, REPORTS)
    return REPORTS[question.name](question, task)
