"""The settings of the whole data plane, and what its parts have to agree on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from serving.knobs import MIB, Knobs
from serving.settings.answers import AdmissionSettings, CallerSettings, RulesSettings, StreamSettings
from serving.settings.arms import ArmSettings, GhostSettings, SpaceSettings, WarmupSettings
from serving.settings.base import Name, Port, Seconds, Settings
from serving.settings.sides import AuthSettings, UpstreamSettings
from serving.settings.storage import MemorySettings, NeighbourSettings, StorageSettings


class GatewaySettings(Settings):
    """The whole data plane.

    Attributes:
        namespace: Separates caches and configurations that share a Redis.
        generation: Part of every answer's identity: under another one nothing that was stored before is found. For a model that
            changed behind its name; what is unreachable is evicted in time.
        redis_url: ``redis://``, ``rediss://`` or ``unix://``; null: memory alone, for one replica.
        redis_deadline: Seconds that a lookup waits for Redis before it goes on as a miss; well below what a miss costs.
        arms: Arms by name; shares sum to 1.
        salt: Of the assignment of keys to arms.
        space: Bounds of the knobs.
        rules: Rules that are not knobs.
        memory: The memory tier.
        neighbours: Other nodes' arenas.
        upstream: The model.
        warmup: Background refreshing.
        ghost: The shadow cache.
        replicas: Gateway replicas.
        host: Address the ingress listens on.
        port: Its port; 0 takes a free one.
        metrics_port: Port on which the node exports metrics, where Ray is started for the gateway alone; 0 takes a free one.
        access_log: Folder of the access log; null for none.
        flush_interval: Seconds between two flushes of metrics and access log.
        max_request_bytes: Largest request body that is accepted.
        admission: Which answers are kept.
        callers: What callers may ask of the cache.
        streams: Streamed answers.
        auth: Who may ask.
        storage: How entries are kept in Redis.
        haproxy: Whether the HAProxy ingress is used where it is available.
        drain: Seconds that requests under way have for their answers when ``cachepilot serve`` is ended; behind HAProxy alone.
    """

    namespace: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "cachepilot"
    generation: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    redis_url: str | None = None
    redis_deadline: Seconds = 0.25
    arms: dict[Name, ArmSettings] = Field(default_factory=lambda: {"control": ArmSettings()}, min_length=1)
    salt: str = ""
    space: SpaceSettings = SpaceSettings()
    rules: RulesSettings = RulesSettings()
    memory: MemorySettings = MemorySettings()
    neighbours: NeighbourSettings = NeighbourSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    warmup: WarmupSettings = WarmupSettings()
    ghost: GhostSettings = GhostSettings()
    replicas: Annotated[int, Field(ge=1)] = 1
    host: str = "127.0.0.1"
    port: Port = 8000
    metrics_port: Port = 8002
    access_log: Path | None = None
    flush_interval: Seconds = 1.0
    max_request_bytes: Annotated[int, Field(gt=0)] = 10 * MIB
    admission: AdmissionSettings = AdmissionSettings()
    callers: CallerSettings = CallerSettings()
    streams: StreamSettings = StreamSettings()
    auth: AuthSettings = AuthSettings()
    storage: StorageSettings = StorageSettings()
    haproxy: bool = True
    drain: Annotated[float, Field(ge=0.0, le=3600.0)] = 10.0

    @field_validator("namespace")
    @classmethod
    def _namespace(cls, value: str) -> str:
        if value in (".", ".."):  # folders are named by it, and go with the run
            raise ValueError(f"expected a name that a folder can have, got {value!r}")
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"expected a redis://, rediss:// or unix:// URL, got {value!r}")
        return value

    @model_validator(mode="after")
    def _shares(self) -> GatewaySettings:
        total = sum(arm.share for arm in self.arms.values())
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            shares = {name: arm.share for name, arm in self.arms.items()}
            raise ValueError(f"arms: expected shares that sum to 1, got {shares} (sum {total:g})")
        if self.replicas > 1 and self.redis_url is None:
            raise ValueError(
                f"redis_url: expected a Redis URL, since {self.replicas} replicas share one cache; got null "
                "(the Redis that `cachepilot serve` brings is for one: start a redis-server and name it)"
            )
        self._secured()
        if self.neighbours.listen is not None and not self.memory.shared:
            raise ValueError("neighbours.listen: expected memory.shared, since what neighbours read is the arena; got false")
        if self.neighbours.listen is not None and self.redis_url is None:
            raise ValueError("neighbours.listen: expected a redis_url, since by it nodes hear of what was removed; got null")
        if self.neighbours.listen is not None and self.storage.encryption_key is not None:
            raise ValueError("neighbours.listen: expected no storage.encryption_key, since entries go to neighbours in the clear")
        return self

    def _secured(self) -> None:
        storage = self.storage
        given = [name for name in ("tls_ca", "tls_cert", "tls_key") if getattr(storage, name) is not None]
        if given and self.redis_url is not None and urlsplit(self.redis_url).scheme != "rediss":
            raise ValueError(
                f"redis_url: expected rediss://, since storage.{' and '.join(given)} is given; got {urlsplit(self.redis_url).scheme}://"
            )
        if storage.tls_key is not None and storage.tls_cert is None:
            raise ValueError("storage.tls_cert: expected the certificate of storage.tls_key, got null")

    @property
    def shares(self) -> dict[str, float]:
        """Share of the keys by arm."""
        return {name: arm.share for name, arm in self.arms.items()}

    @property
    def initial_knobs(self) -> dict[str, Knobs]:
        """Knobs by arm until the tuner writes others."""
        return {name: arm.knobs.knobs() for name, arm in self.arms.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON-ready form from which the same settings can be built, the API key included."""
        return self.model_dump(mode="json")
