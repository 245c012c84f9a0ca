"""A fork server: imports torch once, then forks worker processes on request.

Importing torch takes seconds, a fork milliseconds. The fork server has one thread and computes nothing, so
its forks are clean. A command may fork the server from itself before it has done anything (`prepare`);
otherwise the server is started from scratch.

A run whose network, method or data is an object of this process needs a server that knows the object: it is
forked from this process when training starts, and keeps nothing else of it. That works on a CPU, also with
other threads (a notebook's) and after training; whether it does here is tried first, since it does not where
CUDA is in use.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

REQUEST, REPLY = struct.Struct("!cq"), struct.Struct("!q")
FORK, WAIT, MORE = b"f", b"w", b"+"
MAX_FDS = 200  # in one message; Linux allows 253
TRIAL_SECONDS = 30


class ForkServerDiedError(Exception):
    """The fork server exited, so the exit codes of its workers are unknown; or it could not fork."""


class ForkServer:
    """A handle of the fork server process, which exits with the process that started it."""

    def __init__(self, *, forked: bool = False, tried: bool = False) -> None:
        """`forked`: from this process; `tried`: after a fork has shown that it can train."""
        if tried:
            _try_fork()
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._exited = False
        with theirs:
            self.pid = _fork(theirs) if forked else _start(theirs)

    @property
    def alive(self) -> bool:
        if not self._exited:
            self._exited = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return not self._exited

    def fork(self, fds: Sequence[int]) -> int:
        """Fork a worker that inherits these file descriptors; returns its process id."""
        pid = self._request(FORK, len(fds), fds)
        if pid < 0:
            raise ForkServerDiedError(os.strerror(-pid))
        return pid

    def wait(self, pid: int) -> int:
        """Wait for a worker; returns its exit code, or minus the signal's number. Its process id is not
        reused before this returns."""
        return self._request(WAIT, pid, ())

    def _request(self, kind: bytes, number: int, fds: Sequence[int]) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [REQUEST.pack(kind, number)], fds[:MAX_FDS])
                for start in range(MAX_FDS, len(fds), MAX_FDS):
                    socket.send_fds(self._socket, [MORE], fds[start : start + MAX_FDS])
                reply = self._socket.recv(REPLY.size, socket.MSG_WAITALL)
            except OSError as error:
                raise ForkServerDiedError(str(error)) from None
        if len(reply) < REPLY.size:
            raise ForkServerDiedError("the fork server closed its connection")
        return int(REPLY.unpack(reply)[0])

    def close(self) -> None:
        self._socket.close()
        if not self._exited:
            os.waitpid(self.pid, 0)
            self._exited = True


def _start(theirs: socket.socket) -> int:
    """Start a fork server as a new process."""
    process = subprocess.Popen(  # noqa: S603 (our own module)
        [sys.executable, "-m", "feddumap.engine.forkserver", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C is handled by this process
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path()), "OMP_NUM_THREADS": "1"},
    )
    process.returncode = 0  # `ForkServer` waits for it by its id
    return process.pid


def _fork(theirs: socket.socket) -> int:
    """Start a fork server as a fork of this process."""
    pid = _plain_fork()
    if pid == 0:
        try:
            os.setsid()
            _leave_parent(theirs.fileno())
            _serve_workers(theirs)
        finally:
            os._exit(1)  # skip the cleanup of the parent process
    return pid


def _plain_fork() -> int:
    with warnings.catch_warnings():  # newer versions of Python warn if there are other threads
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _leave_parent(connection: int) -> None:
    """In a fork: let go of everything of the parent but its memory. Files and sockets would otherwise stay
    open (and a run directory locked) as long as this process lives. Each is replaced by the null device, not
    closed: libraries may close their own descriptors in a later fork, and Arrow aborts if that fails."""
    signal.set_wakeup_fd(-1)
    gc.freeze()  # no object of the parent is finalised here
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 (file descriptors)
        if int(name) > 2 and int(name) not in (connection, null):
            with suppress(OSError):  # that of the listing
                os.fstat(int(name))
                os.dup2(null, int(name))
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115 (for good)
    sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115


def _try_fork() -> None:
    """Raise `ForkServerDiedError` if a fork of this process cannot train."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ForkServerDiedError("CUDA is in use in this process")
    pid = _plain_fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(TRIAL_SECONDS)
            torch.set_num_threads(1)
            weight = torch.ones(2, 1, 3, 3, requires_grad=True)
            torch.conv2d(torch.ones(1, 1, 8, 8), weight).sum().backward()  # type: ignore[no-untyped-call]
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        how = "does not answer" if code == -signal.SIGALRM else f"cannot train, exit code {code}"
        raise ForkServerDiedError(f"a fork of this process {how}")


_shared: ForkServer | None = None


def shared() -> ForkServer:
    """The fork server of this process, started on first use and restarted if it exited."""
    global _shared
    if _shared is None or not _shared.alive:
        _shared = ForkServer()
    return _shared


def prepare(workers: int | None) -> None:
    """Fork the fork server from this process if workers are needed and this process has a single thread.
    Call it before any computation."""
    global _shared
    if workers == 1 or (os.cpu_count() or 1) == 1 or _shared is not None:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads start when it is imported

    if threading.active_count() == 1 and _native_threads() == 1:
        _shared = ForkServer(forked=True)


def _native_threads() -> int | None:
    """The number of threads of this process, native ones included; None if the system does not report it."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else None


def search_path() -> list[str]:
    """The module search path of this process and the current folder, so that workers can import user code."""
    entries = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 (an empty entry is the folder)
    return list(dict.fromkeys([*entries, str(Path.cwd())]))


def serve(connection: socket.socket, work: Callable[[Sequence[int]], None]) -> None:
    """Handle fork and wait requests until the other end closes the connection."""
    while True:
        message, fds, _, _ = socket.recv_fds(connection, REQUEST.size, MAX_FDS)
        if len(message) < REQUEST.size:
            return
        kind, number = REQUEST.unpack(message)
        if kind == WAIT:
            _, status = os.waitpid(number, 0)
            connection.sendall(REPLY.pack(os.waitstatus_to_exitcode(status)))
            continue
        for _ in range(MAX_FDS, number, MAX_FDS):
            fds += socket.recv_fds(connection, len(MORE), MAX_FDS)[1]
        try:
            pid = os.fork() if len(fds) == number else -errno.EMFILE  # the system left some out
        except OSError as error:  # too many processes, or no memory
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            connection.close()
            work(fds)
            os._exit(0)
        for fd in fds:  # a pipe closes with its last copy
            os.close(fd)
        connection.sendall(REPLY.pack(pid))


def _serve_workers(connection: socket.socket) -> NoReturn:
    """The main function of the fork server."""
    from feddumap.engine import worker

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.devnull, encoding="utf-8") as null:  # noqa: PTH123 (no path)
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)  # standard output is reserved for results
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a worker inherits the regions of all of them
    serve(connection, worker.main)
    os._exit(0)


if __name__ == "__main__":
    _serve_workers(socket.socket(fileno=int(sys.argv[1])))
