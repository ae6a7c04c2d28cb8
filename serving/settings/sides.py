"""The two sides of the gateway: who may ask it, and the model that it asks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr, field_serializer, field_validator, model_validator

from serving.settings.base import KeyHash, Name, Seconds, Settings, http_url


class AuthSettings(Settings):
    """Who may ask. Keys are given as SHA-256 in hex: ``printf %s "$KEY" | sha256sum``.

    Attributes:
        required: Whether a request without a known key is refused.
        tenants: Hashes of the keys by tenant. Tenants never share an answer. Without tenants all callers share one cache, and
            their ``Authorization`` is the upstream's to judge.
        admin: Hashes of the tokens of the admin API; without one it is off.
    """

    required: bool = False
    tenants: dict[Name, tuple[KeyHash, ...]] = Field(default_factory=dict)
    admin: tuple[KeyHash, ...] = ()

    @model_validator(mode="after")
    def _somebody(self) -> AuthSettings:
        if self.required and not self.tenants:
            raise ValueError("tenants: expected at least one tenant with keys, since keys are required; got none")
        hashes = [value for values in self.tenants.values() for value in values] + list(self.admin)
        if len(set(hashes)) < len(hashes):
            raise ValueError("tenants and admin: expected each key's hash once")
        return self


class UpstreamSettings(Settings):
    """The model behind the cache: any OpenAI-compatible server.

    Attributes:
        base_url: As OpenAI's clients take it, with the version: ``https://api.openai.com/v1``.
        api_key: Sent as a bearer token. Without one the client's own ``Authorization`` header is passed on, unless there are
            tenants, whose keys are the gateway's; warm-up, which has no client, then goes without.
        timeout: Seconds for one whole call.
        connect_timeout: Seconds to connect.
        first_byte_timeout: Seconds until the first byte of an answer; null: ``timeout`` alone.
        idle_timeout: Seconds between two bytes of an answer; null: ``timeout`` alone.
        retries: How often a call that failed before its first byte is made again (connection errors, 502, 503, 504).
        backoff: Seconds before the first retry; doubled each time, with jitter. ``Retry-After`` is heeded up to ``max_backoff``.
        max_backoff: Longest wait between two tries.
        max_inflight: Calls of one replica at the same time; null: no limit.
        max_waiting: Calls that may wait for their turn; more are refused with 429 and ``Retry-After``.
        max_wait: Longest wait for a turn, seconds.
        forward_headers: Request headers passed on to the upstream, besides ``Content-Type`` and ``Authorization``.
    """

    base_url: str = "http://127.0.0.1:8001/v1"
    api_key: SecretStr | None = None
    timeout: Seconds = 600.0
    connect_timeout: Seconds = 5.0
    first_byte_timeout: Seconds | None = None
    idle_timeout: Seconds | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    backoff: Seconds = 0.1
    max_backoff: Seconds = 5.0
    max_inflight: Annotated[int, Field(ge=1)] | None = None
    max_waiting: Annotated[int, Field(ge=0)] = 100
    max_wait: Seconds = 30.0
    forward_headers: tuple[str, ...] = ("openai-organization", "openai-project", "traceparent", "x-llm-sim-output-tokens")

    _url = field_validator("base_url")(http_url)

    @field_validator("forward_headers")
    @classmethod
    def _lower(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in value)

    @field_serializer("api_key", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        # Replicas are built from the JSON form on other machines, so it has to hold the key; repr and logs still hide it.
        return None if value is None else value.get_secret_value()
