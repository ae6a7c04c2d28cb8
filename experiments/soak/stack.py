"""What the soak runs: a Redis that can be killed, and the gateway's settings."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving.redis_server import RedisServer
from serving.settings import GatewaySettings

NAMESPACE = "soak"
ARMS = ("control", "treatment")
FIRST_BYTE_SECONDS = 10.0
"""How long the gateway waits for the model's first byte: longer than a busy machine keeps the model from answering."""


class RestartedRedis:
    """A private Redis that can be killed, frozen and started again at the same address.

    Args:
        directory: Its folder.
        thread: One thread, with which it ends.
    """

    def __init__(self, directory: Path, thread: ThreadPoolExecutor) -> None:
        self._directory, self._thread = directory, thread
        self._server: RedisServer | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        assert self._server is not None
        return self._server.url

    def start(self) -> None:
        """Start it, empty."""
        self._server = self._thread.submit(lambda: RedisServer(self._directory).__enter__()).result()

    def kill(self) -> None:
        """Kill it at once."""
        self._signal(signal.SIGKILL)
        self.end()

    def freeze(self, frozen: bool) -> None:
        """Stop it from answering, or let it go on."""
        self._signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def end(self) -> None:
        """End it; harmless when it has ended."""
        server, self._server = self._server, None
        if server is not None:
            if server.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server.pid, signal.SIGCONT)
            server.__exit__(None, None, None)

    def _signal(self, number: signal.Signals) -> None:
        assert self._server is not None
        assert self._server.pid is not None
        os.kill(self._server.pid, number)


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable, which processes inherit that are started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def gateway_settings(model: str, redis: str, keys: Mapping[str, str], admin: str) -> GatewaySettings:
    """Return the gateway's settings: two replicas, two arms, tenants, answers by meaning, short lives and small budgets.

    Args:
        model: The model's URL.
        redis: Redis' URL.
        keys: The tenants' keys.
        admin: The admin API's token.
    """

    def hashed(key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    knobs = {"cache_size": 128 << 10, "ttl": 30.0, "warmup_ratio": 0.2}
    return GatewaySettings.model_validate(
        {
            "namespace": NAMESPACE,
            "redis_url": redis,
            "replicas": 2,
            "port": 0,
            "metrics_port": 0,
            "arms": {arm: {"share": 1 / len(ARMS), "knobs": knobs} for arm in ARMS},
            "space": {"min_size": 16 << 10, "max_size": 1 << 20, "min_ttl": 1.0, "max_ttl": 60.0},
            "rules": {
                "stale_while_revalidate": 1.0,
                "stale_if_error": 10.0,
                "semantic": {"enabled": True, "threshold": 0.8, "deadline": 0.5, "lsh": {"arms": True}},
            },
            "upstream": {
                "base_url": model,
                "timeout": 30.0,
                "first_byte_timeout": FIRST_BYTE_SECONDS,
                "idle_timeout": 15.0,
                "retries": 1,
                "backoff": 0.05,
            },
            "streams": {"grace": 0.5},
            "auth": {
                "required": True,
                "tenants": {tenant: [hashed(key)] for tenant, key in keys.items()},
                "admin": [hashed(admin)],
            },
        }
    )
