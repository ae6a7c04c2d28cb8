"""What all settings have in common, and the kinds of values that several have."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


def _key_hash(value: str) -> str:
    if len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ValueError('expected the SHA-256 of a key as 64 hexadecimal digits (printf %s "$KEY" | sha256sum)')
    return value


KeyHash = Annotated[str, AfterValidator(_key_hash)]
Port = Annotated[int, Field(ge=0, le=65535)]


def _endpoint(value: str) -> str:
    host, colon, port = value.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and bare and port.isascii() and port.isdigit() and int(port) <= 65535) or (":" in bare) != (bare != host):
        raise ValueError(f"expected host:port, an IPv6 address in brackets, got {value!r}")
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]


def http_url(value: str) -> str:
    """Return the URL without a slash at its end.

    Raises:
        ValueError: If it is no URL of HTTP.
    """
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"expected an http:// or https:// URL, got {value!r}")
    return value.rstrip("/")


class Settings(BaseModel):
    """Base of every settings model: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
