"""Where the parts of one machine find each other: the embedded Redis and the metrics of `cachepilot serve`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from serving.redis_url import address
from serving.settings import GatewaySettings


def run_directory(namespace: str) -> Path:
    """Return the folder of a namespace's sockets on this machine, of this user alone; not made yet."""
    root = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(root) / f"cachepilot-{os.getuid()}" / namespace


def redis_url(settings: GatewaySettings) -> str:
    """Return the URL of the settings' Redis, certificates included, else of the one that `cachepilot serve` brings."""
    return address(settings) or f"unix://{run_directory(settings.namespace) / 'redis.sock'}"


def metrics_url(settings: GatewaySettings) -> str:
    """Return where `cachepilot serve` exports metrics on this machine."""
    return f"http://127.0.0.1:{settings.metrics_port}/metrics"
