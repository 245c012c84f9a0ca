"""Where worker processes come from: a process that imports what they need, once, and forks them.

Importing torch takes seconds. The nursery does it while this process still imports what it needs itself, and
a worker is there at once. It has one thread and never computes, so that its forks are clean: a fork of this
process would not be, which may have threads, and autograd refuses to work in a fork of one that has used it.
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

REQUEST, REPLY = struct.Struct("!cq"), struct.Struct("!q")
FORK, WAIT = b"f", b"w"
MOST_FDS = 200


class NurseryDiedError(Exception):
    """The process is gone, and with it the knowledge of how its forks ended."""


class Nursery:
    """The process, seen from the one that started it. It ends when that one does."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 (our own module)
                [sys.executable, "-m", "feddumap.cohort.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if _is_file(sys.stderr) else None,  # standard output is for results
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process, which ends its workers itself
                env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path()), "OMP_NUM_THREADS": "1"},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

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
                raise NurseryDiedError(str(error)) from None
        if len(reply) < REPLY.size:
            raise NurseryDiedError("it closed its connection")
        return int(REPLY.unpack(reply)[0])

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_shared: Nursery | None = None


def shared() -> Nursery:
    """This process's nursery: started when first asked for, or anew if it died."""
    global _shared
    if _shared is None or not _shared.alive:
        _shared = Nursery()
    return _shared


def prepare(workers: int | None) -> None:
    """Start the nursery, if a run with so many workers will want it, before this process imports torch."""
    if workers != 1 and (os.cpu_count() or 1) > 1:
        shared()


def search_path() -> list[str]:
    """Where this process finds modules, and at last the current folder: workers import the user's, too."""
    entries = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 (an empty entry is the folder)
    return list(dict.fromkeys([*entries, str(Path.cwd())]))


def _is_file(stream: object) -> bool:
    try:
        return stream is not None and stream.fileno() >= 0  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return False


def serve(connection: socket.socket, work: Callable[[Sequence[int]], None]) -> None:
    """The nursery's side: fork and wait as asked, until the other end is closed."""
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


def main() -> None:
    from feddumap.cohort import worker

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])), worker.main)


if __name__ == "__main__":
    main()
