"""Where workers come from, and the regions of memory that they write to."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from feddumap.cohort import nursery as nursery_module
from feddumap.cohort.nursery import Nursery, NurseryDiedError, search_path, shared
from feddumap.cohort.region import Region, Regions


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def test_a_command_forks_its_nursery_while_it_is_clean() -> None:
    """It serves like any other, and keeps nothing of its parent: neither its input nor its output."""
    script = (
        "import os, time\nfrom feddumap.cohort import nursery\nnursery.prepare(2)\n"
        "made = nursery.shared()\nassert made is nursery._shared and made.alive\n"
        "while os.readlink(f'/proc/{made.pid}/fd/1') != os.readlink('/proc/self/fd/2'): time.sleep(0.01)\n"
        "print(os.readlink(f'/proc/{made.pid}/fd/0'))\n"
        "print(len(os.listdir(f'/proc/{made.pid}/task')))\n"
        "made.close()\nprint(made.alive)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["/dev/null", "1", "False"]
    assert done.stderr == ""


def test_one_worker_needs_no_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery_module, "_shared", None)
    nursery_module.prepare(1)
    assert nursery_module._shared is None


def hired(nursery: Nursery) -> tuple[int, int, int]:
    """A worker without regions: its process id, and our ends of its pipes for jobs and replies."""
    jobs, our_jobs = os.pipe()
    our_replies, replies = os.pipe()
    region = Region()
    pid = nursery.fork([jobs, replies, region.fd, region.fd])
    for fd in (jobs, replies):
        os.close(fd)
    region.close()
    return pid, our_jobs, our_replies


def test_a_worker_ends_when_its_pipe_closes_and_the_nursery_tells_how(nursery: Nursery) -> None:
    pid, jobs, replies = hired(nursery)
    other, other_jobs, other_replies = hired(nursery)
    assert pid != other
    os.close(jobs)  # no sibling and not the nursery holds this pipe open
    assert nursery.wait(pid) == 0
    os.kill(other, signal.SIGKILL)
    assert nursery.wait(other) == -signal.SIGKILL
    assert os.read(other_replies, 1) == b""
    for fd in (replies, other_jobs, other_replies):
        os.close(fd)


def test_the_nursery_has_one_thread_so_that_its_forks_are_clean(nursery: Nursery) -> None:
    pid, jobs, replies = hired(nursery)  # by now it has imported everything
    assert len(list(Path(f"/proc/{nursery.pid}/task").iterdir())) == 1
    os.close(jobs)
    nursery.wait(pid)
    os.close(replies)


def test_a_nursery_ends_with_its_other_end() -> None:
    one = Nursery()
    assert one.alive
    one._socket.close()
    until = time.monotonic() + 30
    while one.alive and time.monotonic() < until:
        time.sleep(0.05)
    assert not one.alive


def test_a_dead_nursery_is_noticed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery_module, "_shared", None)
    first = shared()
    assert shared() is first
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(NurseryDiedError):
        first.wait(1)
    until = time.monotonic() + 10
    while first.alive and time.monotonic() < until:
        time.sleep(0.01)
    second = shared()
    assert second is not first
    assert second.alive
    second.close()


def test_workers_look_for_modules_where_this_process_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", "/somewhere"])
    assert search_path() == [str(tmp_path), "/somewhere"]
    monkeypatch.setattr("sys.path", ["/somewhere"])
    assert search_path() == ["/somewhere", str(tmp_path)]


def test_a_lent_region_comes_back_with_its_last_view() -> None:
    regions = Regions(2, stay=1)
    region = regions.take()
    layout = region.write({"weights": {"a": torch.arange(3.0), "b": torch.ones(2, 2)}})
    lent = regions.lend(region, layout)
    kept = lent["weights"]["b"].view(-1)[1:]  # a view of a view
    del lent
    gc.collect()
    assert regions.take() is not region  # the other one: this one is still lent
    assert kept.tolist() == [1, 1, 1]
    del kept
    gc.collect()
    assert regions.take() is region
    regions.close()


def test_when_too_much_is_lent_the_rest_is_copied() -> None:
    regions = Regions(2, stay=1)
    held = []
    for number in range(4):  # more than there are regions, all kept
        region = regions.take()
        layout = region.write({"weights": {"a": torch.full((3,), float(number))}})
        held.append(regions.lend(region, layout)["weights"]["a"])
    assert [tensor.tolist() for tensor in held] == [[number] * 3 for number in range(4)]
    regions.close()
