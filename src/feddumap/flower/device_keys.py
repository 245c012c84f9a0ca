"""Which public key is which device: a table that the server reads and `feddumap flower init` writes.

    [devices]
    0 = "ecdsa-sha2-nistp384 AAAA... node-0"
    1 = "ecdsa-sha2-nistp384 AAAA... node-1"

A value is the content of the device's public key file. The SuperLink has verified that a node holds the
private key, and tells the server's app the public one, so a node cannot pretend to be another device.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from feddumap.config import read_toml
from feddumap.errors import FeddumapError

HEADER = """\
# The public key of each device. A node that has another key than the device it says it is, or one that is not
# listed here, is refused.

[devices]
"""


@dataclass(frozen=True)
class DeviceKeys:
    """The devices by the fingerprints of their public keys."""

    path: Path
    devices: Mapping[str, int]

    @staticmethod
    def read(path: Path) -> DeviceKeys:
        """Read a table; an error names what is wrong in it."""
        table = read_toml(path, "table of device keys").get("devices")
        if not isinstance(table, dict) or not table:
            raise FeddumapError(f'{path} has no table [devices]: expected lines such as 0 = "ecdsa-sha2-…"')
        found: dict[str, int] = {}
        for number, line in table.items():
            if not number.isdecimal():
                raise FeddumapError(f"{path}: {number!r} is not the number of a device, such as 0")
            key = _fingerprint_of_line(line)
            if key is None:
                raise FeddumapError(
                    f"{path}: the key of device {number} is {str(line)[:40]!r}, expected the content of its "
                    'public key file, such as "ecdsa-sha2-nistp384 AAAA…"'
                )
            if key in found:
                raise FeddumapError(f"{path}: devices {found[key]} and {number} have the same key {key}")
            found[key] = int(number)
        return DeviceKeys(path, found)

    def device(self, key: bytes) -> int | None:
        """The device with this public key, in the form in which Flower gives it."""
        return self.devices.get(fingerprint(key))


def to_toml(lines: Sequence[str]) -> str:
    """The table of devices 0, 1 and so on with these lines of public key files."""
    return HEADER + "".join(f'{number} = "{line.strip()}"\n' for number, line in enumerate(lines))


def fingerprint(key: bytes) -> str:
    """The fingerprint of a PEM public key, as `ssh-keygen -l` shows it; empty for no key."""
    try:
        return _fingerprint(load_pem_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    except (ValueError, UnsupportedAlgorithm):
        return ""


def _fingerprint_of_line(line: object) -> str | None:
    try:
        key = load_ssh_public_key(str(line).encode())
        return _fingerprint(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    except (ValueError, UnsupportedAlgorithm):
        return None


def _fingerprint(openssh: bytes) -> str:
    digest = hashlib.sha256(base64.b64decode(openssh.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
