"""Certificates and keys for a federation, in Flower's formats.

The key of the certificate authority is never stored: it signs the server's certificate and is discarded, so
that no other certificate can be signed with it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from feddumap.errors import FeddumapError

ALWAYS = ("localhost", "127.0.0.1")
DAYS = 365
AUTHORITY, CERTIFICATE, SERVER_KEY = "ca.crt", "server.crt", "server.key"
SECRET, TOKEN = "superexec.secret", "control.token"


def make_all(folder: Path, nodes: int, hosts: Sequence[str] = ()) -> None:
    """Everything a federation of `nodes` needs, in a folder: the authority's certificate, the server's
    certificate and key, the secret between the server's two processes, the token for the control interface,
    and a key pair for each node."""
    folder.mkdir(mode=0o700)
    make_certificates(folder, hosts)
    private(folder / SECRET, secrets.token_bytes(32))
    private(folder / TOKEN, secrets.token_hex(32).encode())
    for node in range(nodes):
        make_node_key(folder / f"node-{node}")


def make_certificates(folder: Path, hosts: Sequence[str] = ()) -> None:
    """A certificate for this machine and `hosts`, signed by an authority of its own."""
    names = [_name(host) for host in dict.fromkeys((*ALWAYS, *hosts))]
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)  # clocks differ
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority_name, server_name = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        for name in ("feddumap federation authority", "feddumap federation server")
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())

    def build(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(authority_name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=DAYS))

    authority = (
        build(authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    server = (
        build(server_name, server_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    public(folder / AUTHORITY, authority.public_bytes(serialization.Encoding.PEM))
    public(folder / CERTIFICATE, server.public_bytes(serialization.Encoding.PEM))
    private(
        folder / SERVER_KEY,
        server_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def make_node_key(path: Path) -> None:
    """A node's key pair, `path` and `path`.pub: ECDSA on P-384 in OpenSSH's format, as `ssh-keygen -t ecdsa
    -b 384` makes it. A SuperNode signs its requests with the private key, and the SuperLink checks them with
    the public one."""
    key = ec.generate_private_key(ec.SECP384R1())
    public(
        path.with_suffix(".pub"),
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        + f" {path.name}\n".encode(),
    )
    private(
        path,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )


def private(path: Path, data: bytes) -> None:
    """A new file that only its owner may read, from the moment it exists."""
    _create(path, data, 0o600)


def public(path: Path, data: bytes) -> None:
    """A new file that everybody may read."""
    _create(path, data, 0o644)


def _create(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
        file.write(data)


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # not an address, so it has to be a name
    if not host or not host.isascii() or any(letter.isspace() or letter in "/:@" for letter in host):
        raise FeddumapError(
            f"--host {host!r}: expected the name or address at which devices reach the server, without port "
            "or https://, such as fl.example.org or 192.0.2.7"
        )
    return x509.DNSName(host)


def _usage(*, key_cert_sign: bool = False, digital_signature: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )
