"""Another user of this machine, who tries whatever a local user can: run as root, it becomes `uid` first.

Its input is JSON: {"uid", "ports", "sockets", "paths", "pids", "tokens"}; its output, too: what came of each
attempt. It reads no file after it has changed its user, as it may not be allowed to read Python's either.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TASK_TOKEN_HEADER,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES


def main() -> None:
    asked = json.load(sys.stdin)
    with contextlib.suppress(httpx.HTTPError):  # whatever is imported at the first request, is imported now
        httpx.post("http://127.0.0.1:9", timeout=1)
    signed = _signed()
    os.setgroups([])
    os.setgid(asked["uid"])
    os.setuid(asked["uid"])
    print(
        json.dumps(
            {
                "uid": os.getuid(),
                "answers": {str(port): _answers(port, asked["tokens"], signed) for port in asked["ports"]},
                "sockets": [path for path in asked["sockets"] if _connects(path)],
                "files": [path for path in asked["paths"] if _opens(path)],
                "processes": {pid: _visible(pid) for pid in asked["pids"]},
            }
        )
    )


def _answers(port: int, tokens: list[str], signed: dict[str, str]) -> dict[str, Any]:
    """The status of every request that Flower knows, empty, over TLS (without looking at the certificate):
    bare, with each wrong or stolen credential; and what plain HTTP says."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    given: dict[str, dict[str, str]] = {"bare": {}, "signed": signed}
    for number, token in enumerate(tokens):
        given[f"token {number}"] = {"Authorization": f"Bearer {token}", TASK_TOKEN_HEADER: token}
    found: dict[str, Any] = {"bodies": []}
    with httpx.Client(verify=context, trust_env=False, timeout=20) as client:
        for name, headers in given.items():
            statuses = found[name] = {}
            for (method, path), kind in PROTOBUF_REQUEST_TYPES.items():
                request = client.build_request(
                    method,
                    f"https://127.0.0.1:{port}{path}",
                    content=kind().SerializeToString(),
                    headers={"content-type": "application/protobuf", "accept": "application/protobuf"},
                )
                request.headers.update(headers)
                response = _with_version(client, request, path)
                statuses[path] = response.status_code
                found["bodies"].append(response.content.decode("latin-1"))
    try:
        with httpx.Client(trust_env=False, timeout=5) as client:
            found["plain"] = client.get(f"http://127.0.0.1:{port}/health").status_code
    except httpx.HTTPError as error:
        found["plain"] = type(error).__name__
    return found


def _with_version(client: httpx.Client, request: httpx.Request, path: str) -> httpx.Response:
    """Send a request with the headers by which Flower's programs know each other's versions."""
    name = "flwr CLI" if "control" in path else "supernode" if "fleet" in path else "flower-superexec"
    context = ProtobufRequestContext(path, ActivateNodeRequest(), request)
    return RuntimeVersionHttpInterceptor(component_name=name).intercept(
        context, lambda each: client.send(each.request)
    )


def _signed() -> dict[str, str]:
    """The headers of a node with a key of its own making."""
    from base64 import b64encode

    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    key = ec.generate_private_key(ec.SECP384R1())
    stamp = now().isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, stamp.encode())).decode(),
        TIMESTAMP_HEADER: stamp,
    }


def _connects(path: str) -> bool:
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(address)
        except OSError:
            return False
    return True


def _opens(path: str) -> bool:
    try:
        if Path(path).is_dir():
            list(Path(path).iterdir())
        else:
            Path(path).open("rb").close()
    except OSError:
        return False
    return True


def _visible(pid: int) -> str:
    """What of a process's command line and environment this user can read."""
    found = ""
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{pid}/{name}").read_bytes().decode("latin-1")
    return found


if __name__ == "__main__":
    main()
