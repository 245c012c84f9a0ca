"""Checks of what the slots of a user's method return. What is wrong is one sentence that names the slot.

Methods of this package are not wrapped. `FEDDUMAP_TRACEBACK=1` shows the user's exceptions as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from feddumap.config import Config
from feddumap.core.algorithm import Algorithm, Cohort, Context, Merged, Metrics, Plan, RoundView, ServerStep
from feddumap.core.messages import (
    Answer,
    Architecture,
    Broadcast,
    MissingUpload,
    Question,
    ServerState,
    Tensors,
    Upload,
)
from feddumap.errors import FeddumapError
from feddumap.methods.slot_values import Wrong, json_object, named_like, same_tensors, tensors
from feddumap.system.plugins import TRACEBACK, show_tracebacks, user_line
from feddumap.training.optimizers import UpdateRule
from feddumap.training.samples import Samples

if TYPE_CHECKING:
    from feddumap.device.task import Task

T = TypeVar("T")


class SlotError(FeddumapError):
    """A slot of the user's method returned what it must not, or failed."""


class SlotFailedError(SlotError):
    """A slot of the user's method raised an exception."""


def call(method: str, slot: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call the user's code. Its exception becomes a sentence with the slot, the line and the message."""
    try:
        return function(*args, **kwargs)
    except FeddumapError:
        raise
    except Exception as error:
        if show_tracebacks():
            raise
        raise _failed(method, slot, error) from error


def _failed(method: str, slot: str, error: Exception) -> SlotFailedError:
    place = user_line(error)
    where = f" at {place}" if place else ""
    said = " ".join(str(error).split())
    return SlotFailedError(
        f"method {method!r}: its {slot} failed{where} ({type(error).__name__}: {said}): fix it; "
        f"{TRACEBACK}=1 shows the whole traceback"
    )


def guarded(given: object, name: str) -> Algorithm:
    """The algorithm of a user's method, whose slots check what they return."""
    if not isinstance(given, Algorithm):
        raise SlotError(f"method {name!r} made {_describe(given)}: expected an Algorithm")
    slots = ("local", "device_data", "aggregate", "reshape", "check", "idle", "send", "passes", "reply")
    for slot in slots:
        if not callable(getattr(given, slot)):
            raise SlotError(f"method {name!r}: its {slot} is {_describe(getattr(given, slot))}, no function")
    server: object = given.server
    if not (isinstance(server, ServerStep) and callable(server.init) and callable(server.apply)):
        raise SlotError(
            f"method {name!r}: its server is {_describe(server)}: expected a ServerStep of two functions"
        )
    return _Guard(given, name).algorithm()


def _describe(value: object) -> str:
    """A value for errors: its type, and of what a tuple consists.

    >>> _describe((1, {}))
    'a tuple of int, dict'
    """
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


class _Guard:
    """The checked slots of one algorithm."""

    def __init__(self, inner: Algorithm, name: str) -> None:
        self._inner, self._name = inner, name

    def algorithm(self) -> Algorithm:
        return replace(
            self._inner,
            local=self.local,
            device_data=self.device_data,
            aggregate=self.aggregate,
            mean_only=not self._inner.needs_single_uploads,
            server=ServerStep(self.init, self.apply),
            reshape=self.reshape,
            check=self.check,
            idle=self.idle,
            send=self.send,
            passes=self.passes,
            reply=self.reply,
        )

    def _call(self, slot: str, function: Callable[..., Any], *args: Any) -> Any:
        return call(self._name, slot, function, *args)

    def _require(self, fits: bool, slot: str, value: object, expected: str) -> None:
        if not fits:
            raise SlotError(
                f"method {self._name!r}: its {slot} returned {_describe(value)}: expected {expected}"
            )

    def _verify(self, slot: str, what: str, check: Callable[..., None], *args: Any) -> None:
        try:
            check(*args)
        except Wrong as wrong:
            raise SlotError(f"method {self._name!r}: its {slot} returned {what} {wrong}") from None

    def _metrics(self, slot: str, value: Any) -> None:
        self._verify(slot, "metrics", json_object, value)

    # device side

    def device_data(self, task: Task) -> Samples:
        value = self._call("device_data", self._inner.device_data, task)
        self._require(isinstance(value, Samples), "device_data", value, "Samples")
        self._require(len(value) > 0, "device_data", "no samples", "at least one sample")
        found: Samples = value
        return found

    def local(self, task: Task, samples: Samples) -> Plan | Upload:
        value = self._call("local", self._inner.local, task, samples)
        fits = isinstance(value, Plan | Upload)
        self._require(fits, "local", value, "a Plan (task.plan(...)) or an Upload")
        if isinstance(value, Upload):
            return self._upload("local", task, value)
        rule, report = value.rule, value.report
        self._require(isinstance(rule, UpdateRule), "local", value, "a Plan whose rule is an UpdateRule")
        self._require(callable(report), "local", value, "a Plan whose report is a function")
        plan: Plan = value
        return replace(
            plan,
            batches=self._passing("local", plan.batches),
            rule=UpdateRule(
                lambda space: self._call("rule's init", rule.init, space),
                lambda *args: self._call("rule's step", rule.step, *args),
            ),
            report=lambda steps: self._upload("report", task, self._call("report", report, steps)),
        )

    def _passing(self, slot: str, items: Iterable[T]) -> Iterator[T]:
        iterator = self._call(slot, iter, items)
        done = object()
        while (item := self._call(slot, next, iterator, done)) is not done:
            yield item

    def _upload(self, slot: str, task: Task, value: Any) -> Upload:
        self._require(isinstance(value, Upload), slot, value, "an Upload")
        whole = all(type(number) is int for number in (value.device, value.round, value.samples, value.steps))
        fits = whole and (value.device, value.round) == (task.device, task.broadcast.round)
        self._require(
            fits and value.samples > 0 and value.steps >= 0,
            slot,
            value,
            f"an Upload of device {task.device} and round {task.broadcast.round} whose samples and steps are "
            "whole numbers (task.upload(...) makes one)",
        )
        self._verify(slot, "an Upload whose weights", same_tensors, value.weights, task.broadcast.weights)
        self._verify(slot, "an Upload whose extra", named_like, value.extra, task.broadcast.weights)
        self._verify(slot, "with task.kept", tensors, task.kept)
        found: Upload = value
        return found

    # server side

    def aggregate(self, uploads: Iterable[Upload], view: RoundView) -> Merged:
        watch = _Watch()
        value = watch.call(self._name, "aggregate", self._inner.aggregate, watch.over(uploads), view)
        self._require(isinstance(value, Merged), "aggregate", value, "Merged(weights, extra, metrics)")
        self._verify("aggregate", "Merged whose weights", same_tensors, value.weights, view.state.weights)
        self._verify("aggregate", "Merged whose extra", tensors, value.extra)
        self._metrics("aggregate", value.metrics)
        found: Merged = value
        return found

    def init(self, state: ServerState) -> Tensors:
        value = self._call("server.init", self._inner.server.init, state)
        self._verify("server.init", "what", tensors, value)
        found: Tensors = value
        return found

    def apply(self, weights: Tensors, steps: Tensors, view: RoundView) -> tuple[Tensors, Tensors, Metrics]:
        value = self._call("server.apply", self._inner.server.apply, weights, steps, view)
        three = isinstance(value, tuple) and len(value) == 3
        self._require(three, "server.apply", value, "(weights, steps, metrics)")
        self._verify("server.apply", "weights that", same_tensors, value[0], view.state.weights)
        self._verify("server.apply", "steps that", tensors, value[1])
        self._metrics("server.apply", value[2])
        return value[0], value[1], value[2]

    def reshape(self, state: ServerState, context: Context, cohort: Cohort) -> tuple[ServerState, Metrics]:
        watch = _Watch()
        seen = _WatchedCohort(cohort, watch)
        value = watch.call(self._name, "reshape", self._inner.reshape, state, context, seen)
        two = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], ServerState)
        self._require(two, "reshape", value, "(ServerState, metrics)")
        for group in ("weights", "steps", "mask"):
            self._verify("reshape", f"a ServerState whose {group}", tensors, getattr(value[0], group))
        self._metrics("reshape", value[1])
        return value[0], value[1]

    def send(self, state: ServerState) -> Tensors:
        value = self._call("send", self._inner.send, state)
        self._verify("send", "what", named_like, value, state.weights)
        found: Tensors = value
        return found

    # before training, and for the clock

    def check(self, architecture: Architecture) -> object:
        return self._call("check", self._inner.check, architecture)

    def idle(self, context: Context) -> Sequence[str]:
        value = self._call("idle", self._inner.idle, context)
        fits = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
        self._require(fits, "idle", value, "a list of sentences")
        found: Sequence[str] = value
        return found

    def passes(self, samples: np.ndarray, given: int, config: Config) -> np.ndarray:
        value = self._call("passes", self._inner.passes, samples, given, config)
        numbers = isinstance(value, np.ndarray) and value.shape == samples.shape
        self._require(numbers, "passes", value, "an array with a number for each device")
        found: np.ndarray = value
        return found

    def reply(self, message: Broadcast) -> int:
        value = self._call("reply", self._inner.reply, message)
        self._require(isinstance(value, int), "reply", value, "a whole number of bytes")
        return int(value)


class _Watch:
    """Tells the exceptions of the devices, which a slot waits for, from those of the slot itself."""

    def __init__(self) -> None:
        self._seen: list[BaseException] = []

    def over(self, items: Iterable[T]) -> Iterator[T]:
        try:
            yield from items
        except Exception as error:
            self._seen.append(error)
            raise

    def call(self, method: str, slot: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except FeddumapError:
            raise
        except Exception as error:
            if show_tracebacks() or any(error is seen for seen in self._seen):
                raise
            raise _failed(method, slot, error) from error


class _WatchedCohort:
    """A cohort whose exceptions are its own."""

    def __init__(self, inner: Cohort, watch: _Watch) -> None:
        self._inner, self._watch = inner, watch

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload | MissingUpload]:
        return self._watch.over(self._inner.train(broadcast, devices))

    def survey(self, question: Question, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Answer]:
        return self._watch.over(self._inner.survey(question, broadcast, devices))
