"""Where workers come from, and the regions of memory that they write to."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from feddumap.engine import forkserver
from feddumap.engine.forkserver import ForkServer, ForkServerDiedError, search_path, shared
from feddumap.engine.shared_memory import Region, RegionPool


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def test_a_command_forks_its_fork_server_while_it_is_clean() -> None:
    """It serves like any other, and keeps nothing of its parent: neither its input nor its output."""
    script = (
        "import os, time\nfrom feddumap.engine import forkserver\nforkserver.prepare(2)\n"
        "made = forkserver.shared()\nassert made is forkserver._shared and made.alive\n"
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


def test_one_worker_needs_no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_shared", None)
    forkserver.prepare(1)
    assert forkserver._shared is None


def hired(fork_server: ForkServer) -> tuple[int, int, int]:
    """A worker without regions: its process id, and our ends of its pipes for jobs and replies."""
    jobs, our_jobs = os.pipe()
    our_replies, replies = os.pipe()
    region = Region()
    pid = fork_server.fork([jobs, replies, region.fd, region.fd])
    for fd in (jobs, replies):
        os.close(fd)
    region.close()
    return pid, our_jobs, our_replies


def test_a_worker_ends_when_its_pipe_closes_and_the_fork_server_tells_how(fork_server: ForkServer) -> None:
    pid, jobs, replies = hired(fork_server)
    other, other_jobs, other_replies = hired(fork_server)
    assert pid != other
    os.close(jobs)  # no sibling and not the fork server holds this pipe open
    assert fork_server.wait(pid) == 0
    os.kill(other, signal.SIGKILL)
    assert fork_server.wait(other) == -signal.SIGKILL
    assert os.read(other_replies, 1) == b""
    for fd in (replies, other_jobs, other_replies):
        os.close(fd)


@pytest.mark.slow
def test_the_fork_server_has_one_thread_so_that_its_forks_are_clean(fork_server: ForkServer) -> None:
    pid, jobs, replies = hired(fork_server)  # by now it has imported everything
    assert len(list(Path(f"/proc/{fork_server.pid}/task").iterdir())) == 1
    os.close(jobs)
    fork_server.wait(pid)
    os.close(replies)


def test_a_fork_server_ends_with_its_other_end() -> None:
    one = ForkServer()
    assert one.alive
    one._socket.close()
    until = time.monotonic() + 30
    while one.alive and time.monotonic() < until:
        time.sleep(0.05)
    assert not one.alive


def test_a_dead_fork_server_is_noticed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_shared", None)
    first = shared()
    assert shared() is first
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(ForkServerDiedError):
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
    regions = RegionPool(2, reserve=1)
    region = regions.acquire()
    layout = region.write({"weights": {"a": torch.arange(3.0), "b": torch.ones(2, 2)}})
    lent = regions.lend(region, layout)
    kept = lent["weights"]["b"].view(-1)[1:]  # a view of a view
    del lent
    gc.collect()
    assert regions.acquire() is not region  # the other one: this one is still lent
    assert kept.tolist() == [1, 1, 1]
    del kept
    gc.collect()
    assert regions.acquire() is region
    regions.close()


def test_when_too_much_is_lent_the_rest_is_copied() -> None:
    regions = RegionPool(2, reserve=1)
    held = []
    for number in range(4):  # more than there are regions, all kept
        region = regions.acquire()
        layout = region.write({"weights": {"a": torch.full((3,), float(number))}})
        held.append(regions.lend(region, layout)["weights"]["a"])
    assert [tensor.tolist() for tensor in held] == [[number] * 3 for number in range(4)]
    regions.close()


@pytest.mark.slow
def test_any_number_of_file_descriptors_reaches_a_worker(fork_server: ForkServer) -> None:
    """A message of the socket carries at most 253."""
    jobs, our_jobs = os.pipe()
    our_replies, replies = os.pipe()
    region = Region()
    pid = fork_server.fork([jobs, replies, *[region.fd] * 450])
    try:
        until = time.monotonic() + 60
        while len(list(Path(f"/proc/{pid}/fd").iterdir())) < 452:
            assert time.monotonic() < until, "file descriptors are missing"
            time.sleep(0.01)
    finally:
        os.kill(pid, signal.SIGKILL)
        assert fork_server.wait(pid) == -signal.SIGKILL
        for fd in (jobs, our_jobs, our_replies, replies):
            os.close(fd)
        region.close()


def test_a_fork_that_fails_says_why(fork_server: ForkServer) -> None:
    """The server is out of file descriptors, as one could be out of processes; and it goes on serving."""
    first = hired(fork_server)
    resource.prlimit(fork_server.pid, resource.RLIMIT_NOFILE, (40, 40))
    region = Region()
    with pytest.raises(ForkServerDiedError, match="Too many open files"):
        fork_server.fork([region.fd] * 300)
    region.close()
    second = hired(fork_server)
    for pid, *ours in (first, second):
        os.kill(pid, signal.SIGKILL)
        assert fork_server.wait(pid) == -signal.SIGKILL
        for fd in ours:
            os.close(fd)
