"""Addresses of Redis: certificates go into them, so that every client of one is secured alike; passwords stay out of the logs."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from serving.settings import GatewaySettings


def secured(url: str, *, ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> str:
    """Return the address with certificates, as every client of the package ``redis`` understands it.

    Args:
        url: ``rediss://...``; one of another kind is returned as it is if no certificates are given.
        ca: Certificates that the server's own is checked against; None: the system's.
        cert: The client's certificate.
        key: Its key; None where the certificate's file holds it.

    Raises:
        ValueError: If certificates are given and the address is not ``rediss://``, or a key without its certificate.
    """
    given = {"ssl_ca_certs": ca, "ssl_certfile": cert, "ssl_keyfile": key}
    files = {name: str(path) for name, path in given.items() if path is not None}
    if not files:
        return url
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        raise ValueError(f"redis url: expected rediss:// since certificates are given, got {shown(url)}")
    if key is not None and cert is None:
        raise ValueError(f"redis url: expected a certificate for the key {key}, got none")
    return urlunsplit(parts._replace(query=urlencode({**dict(parse_qsl(parts.query)), **files})))


def address(settings: GatewaySettings) -> str | None:
    """Return the address of the Redis that the settings name, with the certificates that they name; None where there is none."""
    if settings.redis_url is None:
        return None
    storage = settings.storage
    return secured(settings.redis_url, ca=storage.tls_ca, cert=storage.tls_cert, key=storage.tls_key)


def shown(url: str) -> str:
    """Return the address as it may be written into logs: without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
