"""The SuperLink's control interface, without a process of the command `flwr` for every word to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from feddumap.errors import FeddumapError


@dataclass(frozen=True)
class Outcome:
    """How a run ended: whether it was completed, if not why, and the bytes that the SuperLink sent and
    received for it."""

    completed: bool
    reason: str
    sent: int
    received: int


@contextmanager
def control(address: str, certificate: Path, direct: Mapping[str, str]) -> Iterator[ControlHttpClient]:
    """A connection to the SuperLink; `direct` are the variables that keep it from going through a proxy."""
    before = dict(os.environ)
    os.environ.update(direct)
    try:
        client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=False,
            root_certificates=certificate.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        yield client
    except httpx.HTTPError as error:
        raise FeddumapError(f"the SuperLink at {address} did not do what it was asked: {error}") from None
    finally:
        client.close()


def register(client: ControlHttpClient, public_key: Path) -> None:
    """Let the node with this key in, as `flwr supernode register` does."""
    key = load_ssh_public_key(public_key.read_bytes())
    client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(key)))  # type: ignore[arg-type]


def outcome(client: ControlHttpClient) -> Outcome:
    """How the SuperLink's only run ended, as `flwr ls` tells it."""
    (run,) = client.ListRuns(ListRunsRequest()).run_dict.values()
    completed = (run.status.status, run.status.sub_status) == ("finished", "completed")
    reason = " ".join(run.status.details.split()) or run.status.sub_status or run.status.status
    return Outcome(completed, reason, run.bytes_sent, run.bytes_recv)
