"""Worker processes: the same bits as one process, and no death or mistake that hangs a run."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feddumap import run as api
from feddumap.core.messages import Question
from feddumap.core.tensors import digest
from feddumap.device.executor import Executor
from feddumap.device.holdings import SplitHoldings
from feddumap.device.state import InMemoryStore
from feddumap.engine import pool as pool_module
from feddumap.engine import watch
from feddumap.engine.forkserver import MAX_FDS
from feddumap.engine.local import Evaluator, LocalCohort
from feddumap.engine.pool import Pool
from feddumap.engine.rounds import broadcast_of
from feddumap.engine.shared_memory import Region
from feddumap.errors import FeddumapError
from feddumap.methods import compose
from feddumap.system.determinism import deterministic
from tests.conftest import small


@pytest.fixture
def run(home: Path) -> api.Run:
    return api.start(small(data={"devices": 20}))


@pytest.fixture
def pool(run: api.Run) -> Iterator[Pool]:
    made = Pool(run.config, run.dataset.folder, run.split, len(run.dataset.test_labels), 2, InMemoryStore())
    yield made
    made.close()


def local(run: api.Run) -> LocalCohort:
    return LocalCohort(
        Executor(run.config, SplitHoldings(run.dataset, run.split, run.config.run.seed), compose(run.config)),
        Evaluator(run.dataset, run.config),
        InMemoryStore(),
    )


def test_pool_and_process_agree_bit_for_bit(run: api.Run, pool: Pool) -> None:
    """Train, survey and evaluate: one expected result for both kinds of cohort."""
    message = broadcast_of(run.state, run.config)
    devices = [7, 3, 11, 0, 19]
    question = Question("census", {"labels": "counts"})
    with deterministic():
        ours = local(run)
        expected = list(ours.train(message, devices))
        uploads = list(pool.train(message, devices))
        assert [upload.device for upload in uploads] == devices
        for mine, theirs in zip(expected, uploads, strict=True):
            assert digest(mine.weights) == digest(theirs.weights)
            assert (mine.samples, mine.steps, mine.round) == (theirs.samples, theirs.steps, theirs.round)
        everyone = range(20)
        assert list(pool.survey(question, message, everyone)) == list(
            ours.survey(question, message, everyone)
        )
        assert pool.evaluate(run.state) == ours.evaluate(run.state)


@pytest.mark.parametrize("family", ["cnn", "tests.support.own_model:make"])
def test_workers_do_not_change_a_run(home: Path, family: str) -> None:
    """Batch norm's buffers and counters included."""
    keys = {
        "data": {"devices": 100},
        "model": {"name": family},
        "clock": {"train_seconds": 1.0},
        "train": {"rounds": 2, "cohort": 2},
    }
    runs = [api.train(small(**keys, run={"workers": workers, "evaluate_every": 2})) for workers in (1, 2)]
    assert digest(runs[0].state.weights) == digest(runs[1].state.weights)
    for one, two in zip(runs[0].records, runs[1].records, strict=True):
        assert {**one, "wall": 0} == {**two, "wall": 0}


def successor(pool: Pool, victim: int) -> int:
    """The id of the second worker, once it is no longer the victim."""
    deadline = time.monotonic() + 60
    while (pid := pool.pids[1]) == victim:
        assert time.monotonic() < deadline, f"worker {victim} was killed and not replaced"
        time.sleep(0.01)
    return pid


def test_a_killed_worker_is_replaced_and_its_device_retrained(run: api.Run, pool: Pool) -> None:
    message = broadcast_of(run.state, run.config)
    with deterministic():
        expected = [digest(upload.weights) for upload in local(run).train(message, range(12))]
    victims = [pool.pids[1]]
    got = []
    for count, upload in enumerate(pool.train(message, range(12))):
        got.append(digest(upload.weights))
        if count == 5:
            victims.append(successor(pool, victims[0]))
        if count in (1, 5):
            os.kill(victims[-1], signal.SIGKILL)
    assert got == expected
    assert successor(pool, victims[1]) not in victims


def test_a_stopped_worker_is_named_and_replaced(run: api.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its device is trained again, to the same bits."""
    monkeypatch.setattr(watch, "INTERVAL", 0.1)
    monkeypatch.setattr(watch, "NOTICE", 1.0)
    monkeypatch.setattr(watch, "LIMIT", 2.0)
    message = broadcast_of(run.state, run.config)
    with deterministic():
        expected = [digest(upload.weights) for upload in local(run).train(message, range(8))]
    said: list[str] = []
    test_inputs, memory = len(run.dataset.test_labels), InMemoryStore()
    pool = Pool(run.config, run.dataset.folder, run.split, test_inputs, 2, memory, say=said.append)
    try:
        victim = pool.pids[1]
        got = []
        for count, upload in enumerate(pool.train(message, range(8))):
            got.append(digest(upload.weights))
            if count == 0:
                os.kill(victim, signal.SIGSTOP)
        assert got == expected
        assert successor(pool, victim) != victim
    finally:
        pool.close()
    named = [line for line in said if f"worker process {victim} (train, device " in line]
    assert re.search(r"is stopped \(SIGSTOP\) for \S+ s: it is replaced after 2 s", named[0])
    assert named[1].endswith("hangs: it is replaced")


def test_a_worker_that_computes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a job takes: only looks without any processor time in between count."""
    said: list[str] = []
    made = watch.Watch(said.append)
    made.close()
    used = iter([5, 5, 6, 6, 6, 6])
    monkeypatch.setattr(watch, "processor_time", lambda _: (next(used), "S"))
    monkeypatch.setattr(watch, "NOTICE", 3 * watch.INTERVAL)
    monkeypatch.setattr(watch, "LIMIT", 1000 * watch.INTERVAL)
    process = pool_module.WorkerProcess.__new__(pool_module.WorkerProcess)
    process.pid = 17
    with made.over(process, {"verb": "survey", "devices": [1, 2]}):
        for _ in range(5):
            made.look()
        assert said == []
        made.look()
    assert len(said) == 1
    assert said[0].startswith("worker process 17 (survey, 2 devices) does nothing for 3 s")
    made.look()  # and one without a job is not looked at


@pytest.mark.slow
def test_many_workers(run: api.Run) -> None:
    """With more regions than file descriptors go into one message of the fork server."""
    workers = 200
    test_inputs = len(run.dataset.test_labels)
    pool = Pool(run.config, run.dataset.folder, run.split, test_inputs, workers, InMemoryStore())
    try:
        assert 2 * workers + 4 > MAX_FDS
        assert len(set(pool.pids)) == workers
        message = broadcast_of(run.state, run.config)
        assert [upload.device for upload in pool.train(message, [3, 5])] == [3, 5]
    finally:
        pool.close()


def test_too_many_workers_for_this_system_is_a_sentence(run: api.Run) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        pytest.skip("this system has no limit of open files")
    with pytest.raises(
        FeddumapError, match=rf"run\.workers = {most} needs \d+ open files, .* only {most} here"
    ):
        Pool(run.config, run.dataset.folder, run.split, 1, most, InMemoryStore())


def test_a_job_that_kills_every_worker_ends_the_run_with_a_sentence(
    run: api.Run, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pool_module.WorkerProcess.call

    def call(self: pool_module.WorkerProcess, *job: Any) -> dict[str, object]:
        self.kill()
        return original(self, *job)

    monkeypatch.setattr(pool_module.WorkerProcess, "call", call)
    with pytest.raises(FeddumapError, match=r"train job died 3 times \(last: signal 9\).* lower run.workers"):
        list(pool.train(broadcast_of(run.state, run.config), [0]))


def test_a_workers_own_error_comes_back(run: api.Run, pool: Pool) -> None:
    message = broadcast_of(run.state, run.config)
    with pytest.raises(FeddumapError, match="unknown question 'secrets'"):
        list(pool.survey(Question("secrets"), message, [0]))
    with pytest.raises(RuntimeError, match=r"(?s)a worker failed:.*IndexError: device 99"):
        list(pool.train(message, [99]))
    assert next(pool.train(message, [1])).device == 1  # and the pool goes on


def test_results_in_flight_are_bounded(run: api.Run, pool: Pool) -> None:
    """However many devices: what waits in memory is a few uploads."""
    taken = 0

    def devices() -> Iterator[int]:
        nonlocal taken
        for device in range(20):
            taken += 1
            yield device

    header = pool._share(broadcast_of(run.state, run.config))
    results = pool._in_order(
        (({"verb": "train", "broadcast": header, "devices": [device]}, {}) for device in devices()),
        lambda reply, _: reply["uploads"][0]["device"],
    )
    assert next(results) == 0
    assert taken <= 4
    assert list(results) == list(range(1, 20))


@pytest.mark.slow
def test_workers_end_with_their_parent(home: Path, tmp_path: Path) -> None:
    """A parent killed by SIGKILL leaves no process behind, even in the middle of a device."""
    script = (
        "from feddumap import run as api\nfrom tests.conftest import small\n"
        "run = api.start(small(run={'workers': 2}, train={'epochs': 100_000, 'rounds': 1}))\n"
        "engine = run._engine()\nprint(*engine.pids, flush=True)\n"
        "from feddumap.engine.rounds import broadcast_of\n"
        "list(engine.train(broadcast_of(run.state, run.config), [0, 1]))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(3)  # well into training
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while any(_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_closing_in_the_middle_of_a_job(run: api.Run) -> None:
    made = Pool(
        run.config.replace(train={"epochs": 100_000}),
        run.dataset.folder,
        run.split,
        len(run.dataset.test_labels),
        2,
        InMemoryStore(),
    )
    uploads = made.train(broadcast_of(run.state, run.config), [0, 1, 2, 3, 4])
    threading.Timer(1, made.close).start()
    with pytest.raises(pool_module.WorkerDiedError):
        next(uploads)


def test_a_region_holds_any_tensors_and_grows() -> None:
    region, peer_fd = Region(), None
    try:
        peer_fd = os.dup(region.fd)
        peer = Region(peer_fd)
        rng = np.random.default_rng(0)
        for scale in (1, 50, 3):
            groups = {
                "a": {"x": torch.from_numpy(rng.standard_normal((scale, 7))), "n": torch.tensor(5)},
                "b": {"y": torch.arange(scale * 1000, dtype=torch.int16), "none": torch.empty(0, 3)},
                "c": {"z": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)},
            }
            layout = region.write(groups)
            for group, tensors in peer.read(layout).items():
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, groups[group][name])
                    assert tensor.dtype == groups[group][name].dtype
        peer.write({"a": {"x": torch.ones(200_000)}})
        assert region.read([("a", "x", "float32", [200_000], 0)])["a"]["x"].sum() == 200_000
        peer.close()
    finally:
        region.close()
