"""A fork server: imports torch once, then forks worker processes on request.

Importing torch takes seconds, a fork milliseconds. The fork server has one thread and computes nothing, so
its forks are clean; forks of this process would not be, as it may have threads and autograd refuses to run in
a fork of a process that has used it. A command may fork the server from itself before it has done anything
(`prepare`); otherwise the server is started from scratch.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

REQUEST, REPLY = struct.Struct("!cq"), struct.Struct("!q")
FORK, WAIT = b"f", b"w"
MOST_FDS = 200


class ForkServerDiedError(Exception):
    """The process is gone, and with it the knowledge of how its forks ended."""


class ForkServer:
    """The process, seen from the one that started it. It ends when that one does."""

    def __init__(self, *, forked: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._ended = False
        with theirs:
            self.pid = _fork(self._socket, theirs) if forked else _start(theirs)

    @property
    def alive(self) -> bool:
        if not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return not self._ended

    def fork(self, fds: Sequence[int]) -> int:
        """A new worker that inherits these file descriptors; returns its process id."""
        return self._ask(FORK, len(fds), fds)

    def wait(self, pid: int) -> int:
        """How a worker ended: its exit code, or minus the signal's number. Until then its id is its own."""
        return self._ask(WAIT, pid, ())

    def _ask(self, what: bytes, number: int, fds: Sequence[int]) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [REQUEST.pack(what, number)], fds)
                reply = self._socket.recv(REPLY.size, socket.MSG_WAITALL)
            except OSError as error:
                raise ForkServerDiedError(str(error)) from None
        if len(reply) < REPLY.size:
            raise ForkServerDiedError("it closed its connection")
        return int(REPLY.unpack(reply)[0])

    def close(self) -> None:
        self._socket.close()
        if not self._ended:
            os.waitpid(self.pid, 0)
            self._ended = True


def _start(theirs: socket.socket) -> int:
    """A fork server from scratch."""
    process = subprocess.Popen(  # noqa: S603 (our own module)
        [sys.executable, "-m", "feddumap.engine.forkserver", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C is for this process, which ends its workers itself
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path()), "OMP_NUM_THREADS": "1"},
    )
    process.returncode = 0  # it is waited for by its id
    return process.pid


def _fork(ours: socket.socket, theirs: socket.socket) -> int:
    """A fork server that is a copy of this process."""
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()  # or it would never see that the other end is closed
            os.setsid()
            _serve_workers(theirs)
        finally:
            os._exit(1)  # nothing of what this process was about to do
    return pid


_shared: ForkServer | None = None


def shared() -> ForkServer:
    """This process's fork server: started when first asked for, or anew if it died."""
    global _shared
    if _shared is None or not _shared.alive:
        _shared = ForkServer()
    return _shared


def prepare(workers: int | None) -> None:
    """Fork the fork server from this process, if `workers` need one and this process has one thread only.
    Call it before anything is computed."""
    global _shared
    if workers == 1 or (os.cpu_count() or 1) == 1 or _shared is not None:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads start when it is imported

    if threading.active_count() == 1 and _native_threads() == 1:
        _shared = ForkServer(forked=True)


def _native_threads() -> int | None:
    """The threads of this process, Python's or not; None where the system does not tell."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else None


def search_path() -> list[str]:
    """Where this process finds modules, and at last the current folder: workers import the user's, too."""
    entries = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 (an empty entry is the folder)
    return list(dict.fromkeys([*entries, str(Path.cwd())]))


def serve(connection: socket.socket, work: Callable[[Sequence[int]], None]) -> None:
    """The fork server's side: fork and wait as asked, until the other end is closed."""
    while True:
        message, fds, _, _ = socket.recv_fds(connection, REQUEST.size, MOST_FDS)
        if len(message) < REQUEST.size:
            return
        what, number = REQUEST.unpack(message)
        if what == WAIT:
            _, status = os.waitpid(number, 0)
            connection.sendall(REPLY.pack(os.waitstatus_to_exitcode(status)))
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            work(fds)
            os._exit(0)
        for fd in fds:  # a pipe ends when the last copy of it is closed
            os.close(fd)
        connection.sendall(REPLY.pack(pid))


def _serve_workers(connection: socket.socket) -> NoReturn:
    """The fork server's life."""
    from feddumap.engine import worker

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.devnull, encoding="utf-8") as nothing:  # noqa: PTH123 (no path)
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # standard output is for results
    serve(connection, worker.main)
    os._exit(0)


if __name__ == "__main__":
    _serve_workers(socket.socket(fileno=int(sys.argv[1])))
