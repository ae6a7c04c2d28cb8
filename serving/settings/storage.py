"""Where entries are: the memory of this node, that of others, and how they are kept in Redis."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_serializer, field_validator, model_validator

from serving.knobs import MIB
from serving.settings.base import Endpoint, Seconds, Settings


class MemorySettings(Settings):
    """The memory tier.

    Attributes:
        shared: Whether all replicas of a node share one arena; else each has memory of its own. An arena that cannot be opened
            is told of, and the replica goes on with memory of its own.
        path: The arena's file; null: ``/dev/shm/cachepilot-<namespace>-<user id>``, or with ``cachepilot serve`` one in
            ``/dev/shm`` that goes with it. Replicas that name the same file share it.
        size: Bytes of the file, memory that is taken as entries come; null: enough for the largest budgets of all arms, and
            half of the file system at most. One that is used by nobody is replaced where the size changed.
        entry_bytes: What an entry is expected to have on average; sets the size of the index.
    """

    shared: bool = True
    path: Path | None = None
    size: Annotated[int, Field(ge=64 * 1024, le=256 * 1024 * MIB)] | None = None
    entry_bytes: Annotated[int, Field(ge=64, le=MIB)] = 1024

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and "\0" in str(value):
            raise ValueError(f"expected a path, which has no null characters; got {str(value)!r}")
        if value is not None and not value.is_absolute():
            raise ValueError(f"expected an absolute path, since replicas have other working directories; got {str(value)!r}")
        return value


class NeighbourSettings(Settings):
    """Other nodes' arenas, which are asked before Redis is.

    Attributes:
        listen: ``host:port`` at which this node's arena is offered to the others; null: no neighbours at all.
        advertise: ``host:port`` by which the others reach it; null: ``listen``, if that names one address and one port.
        peers: ``host:port`` of every node; none: they find each other through Redis.
        secret: Shared by all nodes, at least 16 characters; needed with ``listen``. Who has it may read the arena and offer
            entries.
        transport: ``rdma``, ``tcp``, or ``auto``: RDMA where both sides have it, else TCP. Both carry entries in the clear.
        device: The RDMA device, with its port and the index of its GID where need be (``mlx5_0:1:3``); null: the first that is
            usable.
        deadline: Seconds that a lookup waits for a neighbour before it goes on to Redis.
        inbox_slots: Entries that one neighbour may have offered and this node not yet taken.
        slot_bytes: Largest entry that is offered, in its stored form.
    """

    listen: Endpoint | None = None
    advertise: Endpoint | None = None
    peers: tuple[Endpoint, ...] = ()
    secret: SecretStr | None = None
    transport: Literal["auto", "rdma", "tcp"] = "auto"
    device: str | None = None
    deadline: Seconds = 0.05
    inbox_slots: Annotated[int, Field(ge=1, le=128)] = 64
    slot_bytes: Annotated[int, Field(ge=4096, le=16 * MIB, multiple_of=64)] = 65536

    @field_validator("secret")
    @classmethod
    def _long(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < 16:
            raise ValueError("expected at least 16 characters (make them with: openssl rand -hex 32)")
        return value

    @model_validator(mode="after")
    def _together(self) -> NeighbourSettings:
        if self.listen is not None and self.secret is None:
            raise ValueError("secret: expected one, since listen is set: neighbours prove to each other that they have it")
        if self.listen is not None and self.advertise is None:
            host, _, port = self.listen.rpartition(":")
            if host in ("0.0.0.0", "[::]", "*") or int(port) == 0:
                raise ValueError(
                    "advertise: expected host:port by which the other nodes reach this one, "
                    f"since listen is {self.listen!r}; got null"
                )
        if self.listen is None and (given := [name for name in ("advertise", "peers") if getattr(self, name)]):
            raise ValueError(f"listen: expected host:port, since {' and '.join(given)} is given; got null")
        return self

    @field_serializer("secret", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


class StorageSettings(Settings):
    """How entries are kept in Redis.

    Attributes:
        encryption_key: 32 bytes in base64: answers and metadata are encrypted (AES-256-GCM) before they leave the process.
            Vectors are not, since they are searched; they tell of what a text is about.
        tls_ca: Certificates that Redis' own is checked against, for ``rediss://``; null: the system's.
        tls_cert: The client's certificate.
        tls_key: Its key.
    """

    encryption_key: SecretStr | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @field_validator("encryption_key")
    @classmethod
    def _sized(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                size = len(base64.b64decode(value.get_secret_value(), validate=True))
            except ValueError:
                size = -1
            if size != 32:
                raise ValueError("expected 32 bytes in base64 (make them with: openssl rand -base64 32)")
        return value

    @field_serializer("encryption_key", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()
