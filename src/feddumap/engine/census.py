"""The census: how many samples each device has and, for some methods, of which labels.

It begins with the devices that are there, of which over a network `run.least_share` are needed. The others
join it at the start of a later round, once they are there; until then they are named as missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from feddumap.core.algorithm import Census, Cohort, Labels
from feddumap.core.messages import Broadcast, Question
from feddumap.device.surveys import label_counts
from feddumap.errors import FeddumapError


def begin_census(
    cohort: Cohort,
    message: Broadcast,
    devices: int,
    labels: Labels,
    whole: bool = False,
    earlier: Census | None = None,
) -> Census:
    """Ask every device for its number of samples and, if the method needs them, its label counts. With
    `whole` all must answer. What `earlier` has of a device stands until it answers."""
    census = earlier
    if census is None or len(census.samples) != devices or (census.labels is None) != (labels == "none"):
        counts = None if labels == "none" else np.zeros((devices, message.architecture.classes))
        census = Census(np.zeros(devices, dtype=np.int64), counts)
    question = Question("census", {"labels": labels}, light=True, partial=not whole)
    return _asked(census, question, cohort, message, range(devices))


def join_census(
    census: Census, cohort: Cohort, message: Broadcast, labels: Labels, chosen: Sequence[int]
) -> Census:
    """The census with the answers of missing devices that are there by now. If all devices chosen for the
    round are missing, they are waited for; an error if too few come."""
    alone = not census.present(chosen)
    question = Question("census", {"labels": labels}, light=True, partial=alone, optional=not alone)
    return _asked(census, question, cohort, message, chosen if alone else sorted(census.missing))


def _asked(
    census: Census, question: Question, cohort: Cohort, message: Broadcast, devices: Sequence[int]
) -> Census:
    """The census with the devices' answers to the question."""
    samples, missing = census.samples.copy(), dict(census.missing)
    counts = None if census.labels is None else census.labels.copy()
    for answer in cohort.survey(question, message, devices):
        if answer.lost:
            missing[answer.device] = answer.lost
            continue
        missing.pop(answer.device, None)
        samples[answer.device] = int(answer.values["samples"])
        if counts is not None:
            counts[answer.device] = _valid_counts(answer.device, answer.values, counts.shape[1])
    return replace(census, samples=samples, labels=counts, missing=missing)


def _valid_counts(device: int, values: Mapping[str, Any], classes: int) -> np.ndarray:
    counts = label_counts(values)
    if counts.shape != (classes,) or not (np.isfinite(counts) & (counts >= 0)).all():
        raise FeddumapError(
            f"device {device} sent invalid label counts: expected {classes} non-negative numbers"
        )
    return counts


def to_json(census: Census) -> dict[str, Any]:
    """The census as a run directory keeps it."""
    known = [device for device in range(len(census.samples)) if census.samples[device]]
    return {
        "devices": len(census.samples),
        "samples": {str(device): int(census.samples[device]) for device in known},
        **(
            {}
            if census.labels is None
            else {"labels": {str(device): census.labels[device].tolist() for device in known}}
        ),
    }


def from_json(value: Mapping[str, Any], devices: int, classes: int) -> Census:
    """Read `to_json`'s result for so many devices and classes back; anything else is a ValueError."""
    try:
        if value["devices"] != devices:
            raise ValueError(f"it is of {str(value['devices'])[:20]} devices, expected {devices}")
        samples = np.zeros(devices, dtype=np.int64)
        for device, count in value["samples"].items():
            if type(count) is not int or count <= 0:
                raise ValueError(f"device {device[:20]} has {str(count)[:20]} samples")
            samples[_index(device, devices)] = count
        if "labels" not in value:
            return Census(samples)
        if value["labels"].keys() != value["samples"].keys():
            raise ValueError("its labels are not those of the devices that it has samples of")
        counts = np.zeros((devices, classes))
        for device, row in value["labels"].items():
            if len(row) != classes or not all(type(n) in (int, float) and 0 <= n < np.inf for n in row):
                raise ValueError(f"the labels of device {device} are not {classes} non-negative numbers")
            counts[_index(device, devices)] = row
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it is no census ({error})") from None
    return Census(samples, counts)


def _index(device: str, devices: int) -> int:
    """The number of a device, as JSON's keys have it."""
    if not device.isascii() or not device.isdecimal() or int(device) >= devices:
        raise ValueError(f"it has a device {device[:20]!r} of {devices}")
    return int(device)
