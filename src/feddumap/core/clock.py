"""The virtual clock: how long a round would last on real devices, without waiting for it."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from feddumap.config import ClockConfig
from feddumap.core.rng import stream
from feddumap.errors import FeddumapError

TRAIN_SECONDS = {"cnn": 2.3, "lenet": 1.3, "vgg11": 8.0, "resnet18": 10.1}
"""T_train: the paper's seconds of local training in a round, of the unpruned model."""

SECONDS_PER_MIB = 1 / 6.25 + 1 / 12.5
"""The paper's links: 50 Mbit/s at the device and 100 Mbit/s at the server, in megabytes a second."""

COLUMNS = ("device", "macs_per_second", "down_mbit", "up_mbit")
BLOCK = 4096  # devices drawn from one stream: a device's speed does not depend on how many there are

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Work:
    """What a round asks of each chosen device.

    `macs` are the forward multiply-adds of one sample now and `full_macs` those of the unpruned model;
    `bytes_down` and `bytes_up` are per device. For each chosen device, `samples` counts those it goes through
    in the round and `own` those of E epochs over its own data, which is what FedAvg does.
    """

    macs: int
    full_macs: int
    bytes_down: int
    bytes_up: int
    samples: npt.NDArray[np.int64]
    own: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Timing:
    """How long the round lasted, whose uploads arrived and whose came after the deadline."""

    seconds: float
    finished: tuple[int, ...]
    dropped: tuple[int, ...]


class Clock(Protocol):
    """Anything that times a round."""

    def round(self, devices: Sequence[int], work: Work) -> Timing: ...

    def transfer(self, devices: Sequence[int], nbytes: int) -> float:
        """Seconds to send each of the devices so many bytes, before the first round."""
        ...


@dataclass(frozen=True)
class PaperClock:
    """The formula behind the paper's training times.

        t = T_train · MACs / MACs_unpruned · s + Σ_devices B / 2²⁰ · (1/6.25 + 1/12.5)  seconds

    The devices train side by side and send one after another. s is how many times FedAvg's samples they go
    through: with Data-sharing in the paper's setting that is its 1 + min(p in %, 5). The paper counts the
    model's bytes B = 4 P once a device, with both links' times; here B is the mean of what goes down and what
    comes up, so equal directions give the paper's value, doubling both doubles the term (FedDA), and a method
    that sends more one way only pays half of the difference.

    >>> size = 4 * 122_570  # CNN
    >>> work = Work(4_548_608, 4_548_608, size, size, np.full(10, 2000), np.full(10, 2000))
    >>> round(PaperClock(train_seconds=2.3).round(range(10), work).seconds, 4)
    3.4222
    """

    train_seconds: float

    def round(self, devices: Sequence[int], work: Work) -> Timing:
        times = float(work.samples.sum() / work.own.sum()) if len(work.own) else 0.0  # nobody trains
        train = self.train_seconds * work.macs / work.full_macs * times
        sent = self.transfer(devices, work.bytes_down + work.bytes_up)
        return Timing(train + sent, tuple(devices), ())

    def transfer(self, devices: Sequence[int], nbytes: int) -> float:
        return len(devices) * nbytes / 2 / 2**20 * SECONDS_PER_MIB


@dataclass(frozen=True, eq=False)
class Fleet:
    """Devices with speeds of their own, all working and sending at the same time.

        t_k = bytes_down / down_k + 3 · MACs · samples_k / speed_k + bytes_up / up_k

    The 3 is one forward pass and a backward pass of about two. The round lasts as long as its slowest
    device; with a deadline, devices that need longer are dropped and the round ends at the deadline at the
    latest. Speeds are in multiply-adds a second, links in bytes a second.

    >>> fleet = Fleet(np.array([3e6, 1e6]), np.full(2, 1e3), np.full(2, 500.0), deadline=10.0)
    >>> samples = np.array([3000, 3000])
    >>> fleet.round([1, 0], Work(1000, 1000, 2000, 1000, samples, samples))
    Timing(seconds=10.0, finished=(0,), dropped=(1,))
    """

    speed: Floats
    down: Floats
    up: Floats
    deadline: float | None = None

    def seconds(self, devices: Sequence[int], work: Work) -> Floats:
        """t_k of each of the devices."""
        k = np.asarray(devices, dtype=np.int64)
        train = 3.0 * work.macs * np.asarray(work.samples, dtype=np.float64) / self.speed[k]
        return np.asarray(work.bytes_down / self.down[k] + train + work.bytes_up / self.up[k])

    def round(self, devices: Sequence[int], work: Work) -> Timing:
        seconds = self.seconds(devices, work)
        limit = math.inf if self.deadline is None else self.deadline
        in_time = seconds <= limit
        finished = tuple(k for k, good in zip(devices, in_time, strict=True) if good)
        dropped = tuple(k for k, good in zip(devices, in_time, strict=True) if not good)
        return Timing(min(limit, float(seconds.max(initial=0.0))), finished, dropped)

    def transfer(self, devices: Sequence[int], nbytes: int) -> float:
        return float((nbytes / self.down[np.asarray(devices, dtype=np.int64)]).max(initial=0.0))


def require_finisher(clock: Clock, devices: Sequence[int], work: Work) -> None:
    """Raise an error if no device at all meets the deadline: the run would never train anything."""
    if not isinstance(clock, Fleet) or clock.deadline is None or not len(devices):
        return
    seconds = clock.seconds(devices, work)
    if (fastest := float(seconds.min())) > clock.deadline:
        raise FeddumapError(
            f"clock.deadline = {clock.deadline:g} seconds drops all {len(devices)} devices, so nothing is "
            f"trained: the fastest, device {devices[int(seconds.argmin())]}, needs {fastest:.3g}; raise it "
            "above that, or remove it"
        )


def resolve(config: ClockConfig, family: str) -> ClockConfig:
    """The keys with the profile that is meant where none is given: the paper's where its seconds of training
    are known, else the general one."""
    if config.profile is not None:
        return config
    known = config.train_seconds is not None or family in TRAIN_SECONDS
    return config.model_copy(update={"profile": "paper" if known else "general"})


def build(config: ClockConfig, family: str, devices: int, seed: int) -> Clock:
    """The clock of a run."""
    config = resolve(config, family)
    unused = ("train_seconds",) if config.profile == "general" else ("fleet", "deadline")
    for key in unused:
        if getattr(config, key) is not None:
            raise FeddumapError(
                f"clock.{key} = {getattr(config, key)!r}: has no meaning with clock.profile = "
                f"{config.profile!r}; remove it or set the other profile"
            )
    if config.profile == "paper":
        seconds = config.train_seconds or TRAIN_SECONDS.get(family)
        if seconds is None:
            raise FeddumapError(
                f"clock.profile = 'paper': the paper gives no training time for model {family!r} "
                f"(only for {', '.join(TRAIN_SECONDS)}); set clock.train_seconds or clock.profile = 'general'"
            )
        return PaperClock(seconds)
    if config.fleet is not None:
        speed, down, up = read(Path(config.fleet), devices).T
    else:
        median = np.array([config.macs_per_second, config.down_mbit, config.up_mbit])
        speed, down, up = draw(median, config.spread, devices, seed).T
    mbit = 1e6 / 8  # bytes
    return Fleet(speed, down * mbit, up * mbit, config.deadline)


def draw(median: Floats, spread: float, devices: int, seed: int) -> Floats:
    """Speed, download and upload of each device, [N, 3]: median · exp(spread · z) with z standard normal."""
    blocks = range(-(-devices // BLOCK))
    normal = np.concatenate([stream(seed, "fleet", block).standard_normal((BLOCK, 3)) for block in blocks])
    return np.asarray(median * np.exp(spread * normal[:devices]))


def read(path: Path, devices: int) -> Floats:
    """Speed, download and upload of each device, [N, 3], from a CSV with the columns of `COLUMNS`."""
    values = np.full((devices, 3), np.nan)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            header = tuple(cell.strip() for cell in next(rows, []))
            if header != COLUMNS:
                raise FeddumapError(
                    f"{path} line 1: expected the header {','.join(COLUMNS)}, not {','.join(header)!r}"
                )
            for row in rows:
                if row:
                    device, numbers = _parse(row, devices, f"{path} line {rows.line_num}")
                    if not np.isnan(values[device, 0]):
                        raise FeddumapError(
                            f"{path} line {rows.line_num}: device {device} for the second time; keep one line"
                        )
                    values[device] = numbers
    except OSError as error:
        raise FeddumapError(f"clock.fleet = {str(path)!r}: cannot read it: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise FeddumapError(f"clock.fleet = {str(path)!r}: expected a CSV file in UTF-8: {error}") from None
    missing = np.flatnonzero(np.isnan(values[:, 0]))
    if missing.size:
        raise FeddumapError(
            f"{path}: no line for device {missing[0]} ({missing.size} of {devices} missing); expected a line "
            f"for each of 0 to {devices - 1}; add them or lower data.devices"
        )
    return values


def _parse(row: list[str], devices: int, where: str) -> tuple[int, list[float]]:
    if len(row) != len(COLUMNS):
        raise FeddumapError(f"{where}: {len(row)} fields, expected the {len(COLUMNS)} of {','.join(COLUMNS)}")
    try:
        device = int(row[0])
    except ValueError:
        device = -1
    if not 0 <= device < devices:
        raise FeddumapError(f"{where}: device {row[0]!r}, expected a whole number from 0 to {devices - 1}")
    return device, [_number(cell, name, where) for cell, name in zip(row[1:], COLUMNS[1:], strict=True)]


def _number(cell: str, name: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise FeddumapError(f"{where}: {name} {cell!r}, expected a number above 0")
    return value
