"""The session's one running stack; see :mod:`tests.e2e.stack`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving.app import start
from serving.llm_sim import LlmSimProcess
from serving.redis_server import RedisServer
from serving.settings import GatewaySettings, LlmSimSettings
from tests.e2e.stack import MODEL, Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Stack]:
    """Redis, the simulated model and Ray Serve with two replicas and two arms."""
    access_log = tmp_path_factory.mktemp("access-log")
    with LlmSimProcess(LlmSimSettings(port=0, model=MODEL, ttft=0.005, tpot=0.00002)) as model:
        settings = GatewaySettings.model_validate(
            {
                "namespace": "e2e",
                "redis_url": redis_server.url,
                "redis_deadline": 10.0,
                "replicas": 2,
                "port": 0,
                "metrics_port": 0,
                "arms": {
                    name: {"share": 0.5, "knobs": {"cache_size": 1 << 20, "ttl": 600.0}} for name in ("control", "treatment")
                },
                "space": {"size_steps": 6, "ttl_steps": 4},
                "upstream": {"base_url": model.base_url},
                "ghost": {"window": 1.0},
                "access_log": str(access_log),
            }
        )
        with start(settings, dashboard=True, deadline=180.0) as gateway:
            yield Stack(gateway, model, redis_server, settings, access_log)
