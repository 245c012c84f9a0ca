"""Parts of Flower outside its public interface: named and imported here, and nowhere else.

`feddumap flower up` uses them to require a token of whoever uses the control interface, to register nodes
without a process for each, and to fork apps from a process that has imported torch. `MISSING` names the first
part that the installed version of Flower lacks, or is None. With a part missing the other names here must not
be used, and `flower up` works with Flower's own commands, which are slower and open to other users of the
machine.
"""

from __future__ import annotations

from collections.abc import Iterable

MISSING: str | None = None

try:
    from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, AuthnType
    from flwr.proto.control_pb2 import ListRunsRequest, ListRunsResponse, RegisterNodeRequest
    from flwr.proto.run_pb2 import Run as RunMessage
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.constant import (
        TASK_TYPE_TO_APPIO_API_ADDRESS_ARG,
        TASK_TYPE_TO_COMMAND,
        TaskType,
    )
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
    from flwr.superlink import config_loader
    from flwr.superlink.auth_plugin import ControlAuthnPlugin
    from flwr.superlink.cli import flower_superlink, flwr_serverapp
    from flwr.supernode.cli import flwr_clientapp
except ImportError as error:
    MISSING = str(error).split(" (")[0]  # without the path of the file
else:
    _SPEC = "task_type runtime_api_address token insecure root_certificates_path parent_pid"
    _ATTRIBUTES: tuple[tuple[str, object, str], ...] = (
        ("ListRunsResponse", ListRunsResponse(), "run_dict"),
        ("Run", RunMessage(), "status bytes_sent bytes_recv"),
        ("Run.status", RunMessage().status, "status sub_status details"),
        ("RegisterNodeRequest", RegisterNodeRequest(), "public_key"),
        ("TaskType", TaskType, "CLIENT_APP SERVER_APP"),
        ("AuthnType", AuthnType, "OIDC"),
        ("config_loader", config_loader, "get_control_authn_plugins load_control_authn_plugin"),
        ("ControlAuthnPlugin", ControlAuthnPlugin, "validate_tokens_in_metadata refresh_tokens"),
        ("ControlHttpClient", ControlHttpClient, "from_server_address RegisterNode ListRuns close"),
        ("run_superexec", run_superexec, "get_executor"),
        ("LaunchResult", LaunchResult, "accepted"),
        ("SubprocessExecutor", SubprocessExecutor, "launch"),
    )

    def _lacking() -> Iterable[str]:
        for owner, value, names in _ATTRIBUTES:
            yield from (f"{owner} has no {name}" for name in names.split() if not hasattr(value, name))
        fields = ExecutionSpec.__annotations__
        for name in (*_SPEC.split(), "runtime_dependency_install"):
            if name not in fields:
                yield f"ExecutionSpec has no {name}"

    MISSING = next(iter(_lacking()), None)

__all__ = [
    "ACCESS_TOKEN_KEY",
    "MISSING",
    "NOOP_ACCOUNT_NAME",
    "NOOP_FLWR_AID",
    "TASK_TYPE_TO_APPIO_API_ADDRESS_ARG",
    "TASK_TYPE_TO_COMMAND",
    "AccountInfo",
    "AuthnType",
    "ControlAuthnPlugin",
    "ControlHttpClient",
    "ExecutionSpec",
    "LaunchResult",
    "ListRunsRequest",
    "RegisterNodeRequest",
    "RuntimeVersionHttpInterceptor",
    "SubprocessExecutor",
    "TaskType",
    "config_loader",
    "flower_superexec",
    "flower_superlink",
    "flwr_clientapp",
    "flwr_serverapp",
    "public_key_to_bytes",
    "run_superexec",
]
