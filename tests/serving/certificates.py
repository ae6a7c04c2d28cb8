"""An authority, certificates of its own, and a Redis behind TLS, for tests."""

from __future__ import annotations

import datetime
import ipaddress
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from serving.ports import free_port
from tests.requirements import program

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; its own is at ``cert``."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.cert = folder / f"{name}.pem"
        made = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.cert.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, address: str = "127.0.0.1") -> Pair:
        """Make a certificate for an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(subject, key).add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False
        )
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.cert.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return pair

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
        )


@contextmanager
def redis_behind_tls(folder: Path, authority: Authority, server: Pair, client: Pair) -> Iterator[str]:
    """Run a Redis that speaks TLS alone and asks its clients for certificates; gives its address."""
    port = free_port()
    command = [
        program("redis-server"), "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", "",
        "--dir", str(folder), "--logfile", str(folder / "redis.log"), "--tls-auth-clients", "yes",
        "--tls-cert-file", str(server.cert), "--tls-key-file", str(server.key), "--tls-ca-cert-file", str(authority.cert),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 15
        with redis.Redis(
            port=port, ssl=True, ssl_ca_certs=str(authority.cert), ssl_certfile=str(client.cert), ssl_keyfile=str(client.key),
            ssl_check_hostname=False,
        ) as probing:  # fmt: skip
            while True:
                assert process.poll() is None, (folder / "redis.log").read_text()
                try:
                    probing.ping()
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < deadline, (folder / "redis.log").read_text()
        yield f"rediss://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
