"""`python -m feddumap.flower.local.prefork`: a flower-superexec whose apps start without delay.

Flower starts a process for the server's app and for every message to a device, and importing torch takes
longer than most rounds. Here apps are forks of one process that has imported everything, computes nothing and
has one thread, so each fork is a clean start. The arguments are those of `flower-superexec`; with several
sets of them, `--` between, the imports are done once for all. `--log PATH` is the file that a set's output is
appended to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported: a fork would lack its threads

from feddumap.flower.internals import (
    TASK_TYPE_TO_APPIO_API_ADDRESS_ARG,
    TASK_TYPE_TO_COMMAND,
    ExecutionSpec,
    LaunchResult,
    SubprocessExecutor,
    TaskType,
    flower_superexec,
    flwr_clientapp,
    flwr_serverapp,
    run_superexec,
)

SEPARATOR, LOG = "--", "--log"
FORKED = (TaskType.CLIENT_APP, TaskType.SERVER_APP)


def main() -> None:
    programs = load()
    groups = _groups(sys.argv[1:])
    for number, arguments in enumerate(groups):
        if len(groups) == 1 or not os.fork():
            sys.argv = [sys.argv[0], *_redirected(arguments)]
            if len(groups) > 1 and "FLWR_HOME" in os.environ:
                os.environ["FLWR_HOME"] = f"{os.environ['FLWR_HOME']}/{number}"
            serve(programs)
            return
    for _ in groups:
        os.wait()


def load() -> dict[str, Callable[[], None]]:
    """Flower's programs that run apps, after importing what the apps will import."""
    import feddumap.flower.client
    import feddumap.flower.server  # noqa: F401 (imported here, once, for all forks)

    return {TaskType.CLIENT_APP: flwr_clientapp, TaskType.SERVER_APP: flwr_serverapp}


def serve(programs: Mapping[str, Callable[[], None]]) -> None:
    """Run flower-superexec with an executor that forks."""
    executor = ForkExecutor(start_fork_server(programs))
    setattr(run_superexec, "get_executor", lambda *_, **__: executor)  # noqa: B010 (it is not exported)
    flower_superexec()


def _groups(arguments: list[str]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument == SEPARATOR:
            groups.append([])
        else:
            groups[-1].append(argument)
    return groups


def _redirected(arguments: list[str]) -> list[str]:
    """The arguments without --log, whose file becomes this process's output."""
    if LOG not in arguments:
        return arguments
    place = arguments.index(LOG)
    log = os.open(arguments[place + 1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    return arguments[:place] + arguments[place + 2 :]


class ForkExecutor(SubprocessExecutor):
    """Sends the command lines of apps to the fork server."""

    def __init__(self, fork_server: int) -> None:
        self._fork_server = fork_server

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type not in FORKED or spec.runtime_dependency_install:
            return super().launch(spec)
        address = TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type]
        arguments = [address, spec.runtime_api_address, "--token", spec.token]
        if spec.insecure:
            arguments += ["--insecure"]
        elif spec.root_certificates_path is not None:
            arguments += ["--root-certificates", spec.root_certificates_path]
        if spec.parent_pid is not None:
            arguments += ["--parent-pid", str(spec.parent_pid)]
        request = json.dumps([spec.task_type, *arguments]).encode() + b"\n"
        os.write(self._fork_server, request)  # a broken pipe ends this process as well
        return LaunchResult.accepted()


def start_fork_server(programs: Mapping[str, Callable[[], None]]) -> int:
    """Fork the process that forks apps; returns a pipe that takes their types and arguments, one JSON line
    each. The process exits when the pipe is closed."""
    requests, end = os.pipe()
    if not os.fork():
        os.close(end)
        _fork_apps(requests, programs)
    os.close(requests)
    return end


def _fork_apps(requests: int, programs: Mapping[str, Callable[[], None]]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it exits with its parent
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its children need no wait
    buffer = b""
    while received := os.read(requests, 1 << 16):
        *lines, buffer = (buffer + received).split(b"\n")
        for line in lines:
            if not os.fork():
                os.close(requests)
                task_type, *arguments = json.loads(line)
                _run_program(TASK_TYPE_TO_COMMAND[task_type], programs[task_type], arguments)
    os._exit(0)


def _run_program(name: str, program: Callable[[], None], arguments: list[str]) -> NoReturn:
    """Run a program in this fork, and exit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = [name, *arguments]
    code: object = 0
    try:
        program()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
