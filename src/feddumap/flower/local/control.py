"""The SuperLink's control interface: registering nodes, and how a run ended."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from feddumap.errors import FeddumapError

if TYPE_CHECKING:
    from feddumap.flower.internals import ControlHttpClient


@dataclass(frozen=True)
class Outcome:
    """How a run ended: whether it was completed, why not, and the bytes that the SuperLink sent and received
    for it."""

    completed: bool
    reason: str
    sent: int
    received: int

    @staticmethod
    def read(status: str, details: str, sent: int, received: int) -> Outcome:
        """From the words of `flwr list`, such as "finished:failed" and the reason."""
        reason = " ".join(details.split()) or status.rsplit(":", 1)[-1]
        return Outcome(status == "finished:completed", reason, sent, received)


class Control(Protocol):
    """What `feddumap flower up` asks of a SuperLink."""

    def register(self, public_key: Path) -> None:
        """Admit the node with this key."""

    def outcome(self) -> Outcome:
        """How the SuperLink's only run ended."""


class CommandControl:
    """By the command `flwr`, a process for each request. `flwr` runs it and returns what it printed."""

    def __init__(self, flwr: Callable[..., str], connection: str) -> None:
        self._flwr, self._connection = flwr, connection

    def register(self, public_key: Path) -> None:
        self._flwr("supernode", "register", public_key, self._connection)

    def outcome(self) -> Outcome:
        printed = self._flwr("list", self._connection, "--format", "json")
        (run,) = _first_object(printed)["runs"]
        traffic = run["network-traffic"]
        details = run["status-details"].removeprefix("N/A")
        return Outcome.read(run["status"], details, traffic["outbound-bytes"], traffic["inbound-bytes"])


def _first_object(text: str) -> dict[str, Any]:
    """
    >>> _first_object('listing runs ...\\n{"runs": []}\\n')
    {'runs': []}
    """
    try:
        value, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except ValueError:
        raise FeddumapError(f"expected JSON from `flwr list`, not {text[:200]!r}") from None
    found: dict[str, Any] = value
    return found


class DirectControl:
    """By Flower's own client, without a process."""

    def __init__(self, client: ControlHttpClient) -> None:
        self._client = client

    def register(self, public_key: Path) -> None:
        from feddumap.flower.internals import RegisterNodeRequest, public_key_to_bytes

        key = load_ssh_public_key(public_key.read_bytes())
        data = public_key_to_bytes(key)  # type: ignore[arg-type]
        self._client.RegisterNode(RegisterNodeRequest(public_key=data))

    def outcome(self) -> Outcome:
        from feddumap.flower.internals import ListRunsRequest

        (run,) = self._client.ListRuns(ListRunsRequest()).run_dict.values()
        status = f"{run.status.status}:{run.status.sub_status}".rstrip(":")
        return Outcome.read(status, run.status.details, run.bytes_sent, run.bytes_recv)

    def refused(self) -> bool:
        """Whether the SuperLink refuses a request with this client's token, or without one."""
        from feddumap.flower.internals import ListRunsRequest

        try:
            self._client.ListRuns(ListRunsRequest())
        except httpx.HTTPStatusError as error:
            return error.response.status_code == httpx.codes.UNAUTHORIZED
        return False


class _Token:
    """Adds the token to requests, as the command `flwr` does."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers["Authorization"] = f"Bearer {self._token}"
        return call_next(context)


def credentials(address: str, token: str) -> str:
    """The `credentials.yaml` in which the command `flwr` finds the token for a SuperLink. (JSON is YAML.)"""
    values = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": token}
    encoded = {
        f"flower.account-auth.{address}.{name}": base64.b64encode(value.encode()).decode()
        for name, value in values.items()
    }
    return json.dumps(encoded, indent=1) + "\n"


@contextmanager
def direct_control(
    address: str, certificate: Path, env: Mapping[str, str], token: str | None
) -> Iterator[DirectControl]:
    """A connection to the SuperLink; `env` holds variables that must be set when it is made."""
    from feddumap.flower.internals import ControlHttpClient, RuntimeVersionHttpInterceptor

    before = dict(os.environ)
    os.environ.update(env)
    try:
        client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=False,
            root_certificates=certificate.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
                *([] if token is None else [_Token(token)]),
            ],
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        yield DirectControl(client)
    except httpx.HTTPError as error:
        raise FeddumapError(f"the SuperLink at {address} did not answer as expected: {error}") from None
    finally:
        client.close()
