"""The process of a worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

from feddumap.engine.shared_memory import Region


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="between messages", marks=pytest.mark.slow),
        pytest.param(b'{"kind": "tr', id="in a message"),
    ],
)
def test_a_worker_exits_when_its_parent_is_killed(sent: bytes) -> None:
    """Its pipe closes, perhaps in the middle of a line."""
    regions = [Region().fd, Region().fd]
    code = f"from feddumap.engine.worker import main; main([0, 1, {regions[0]}, {regions[1]}])"
    worker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=regions,
    )
    try:
        worker.communicate(sent, timeout=120)
    finally:
        worker.kill()
    assert worker.returncode == 0
