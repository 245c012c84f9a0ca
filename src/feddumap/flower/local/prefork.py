"""`python -m feddumap.flower.local.prefork`: a flower-superexec whose apps start at once.

Flower starts a process for the server's app and for every message to a device, and importing torch in it
takes longer than most rounds need. Here they are forks of one that has imported everything, never computes
and has one thread, so that each is a clean start. The arguments are those of `flower-superexec`; of several,
with `--` between them, the imports are done once for all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported: a fork would be without its threads

from flwr.supercore.constant import (
    TASK_TYPE_TO_APPIO_API_ADDRESS_ARG,
    TASK_TYPE_TO_COMMAND,
    TaskType,
)
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor import ExecutionSpec

SEPARATOR = "--"
FORKED = (TaskType.CLIENT_APP, TaskType.SERVER_APP)


def main() -> None:
    programs = load()
    groups = _groups(sys.argv[1:])
    for number, arguments in enumerate(groups):
        if len(groups) == 1 or not os.fork():
            sys.argv = [sys.argv[0], *arguments]
            if len(groups) > 1 and "FLWR_HOME" in os.environ:
                os.environ["FLWR_HOME"] = f"{os.environ['FLWR_HOME']}/{number}"
            serve(programs)
            return
    for _ in groups:
        os.wait()


def load() -> dict[str, Callable[[], None]]:
    """Flower's programs that run apps, with all that the apps will import."""
    from flwr.superlink.cli import flwr_serverapp
    from flwr.supernode.cli import flwr_clientapp

    import feddumap.flower.client
    import feddumap.flower.server  # noqa: F401 (imported here, once, for all forks)

    return {TaskType.CLIENT_APP: flwr_clientapp, TaskType.SERVER_APP: flwr_serverapp}


def serve(programs: Mapping[str, Callable[[], None]]) -> None:
    """Be a flower-superexec."""
    executor = ForkExecutor(start_fork_server(programs))
    setattr(run_superexec, "get_executor", lambda *_, **__: executor)  # noqa: B010 (it is not exported)
    from flwr.supercore.cli.flower_superexec import flower_superexec

    flower_superexec()


def _groups(arguments: list[str]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument == SEPARATOR:
            groups.append([])
        else:
            groups[-1].append(argument)
    return groups


class ForkExecutor(SubprocessExecutor):
    """Hands the command lines of apps to the fork server."""

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
        order = json.dumps([spec.task_type, *arguments]).encode() + b"\n"
        os.write(self._fork_server, order)  # without a fork server, the end of this too
        return LaunchResult.accepted()


def start_fork_server(programs: Mapping[str, Callable[[], None]]) -> int:
    """Fork the process that apps come from; returns the end of a pipe that takes their kinds and arguments, a
    JSON line each. It ends when that is closed."""
    orders, end = os.pipe()
    if not os.fork():
        os.close(end)
        _nurse(orders, programs)
    os.close(orders)
    return end


def _nurse(orders: int, programs: Mapping[str, Callable[[], None]]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that it works for
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for its children
    buffer = b""
    while received := os.read(orders, 1 << 16):
        *lines, buffer = (buffer + received).split(b"\n")
        for line in lines:
            if not os.fork():
                os.close(orders)
                kind, *arguments = json.loads(line)
                _become(TASK_TYPE_TO_COMMAND[kind], programs[kind], arguments)
    os._exit(0)


def _become(name: str, program: Callable[[], None], arguments: list[str]) -> NoReturn:
    """Be the program, in this fork."""
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
