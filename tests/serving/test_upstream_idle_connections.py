"""The client of the model does not send a call on a connection that the model's server is about to close."""

from __future__ import annotations

import uvicorn

from serving.settings import UpstreamSettings
from serving.upstream import IDLE_SECONDS, Upstream


async def test_idle_connections_are_given_up_before_uvicorn_closes_them() -> None:
    client = Upstream(UpstreamSettings())
    await client.open()
    try:
        session = client._open_session()
        assert session.connector is not None
        assert session.connector._keepalive_timeout == IDLE_SECONDS  # type: ignore[attr-defined]
        assert uvicorn.Config(lambda: None).timeout_keep_alive > IDLE_SECONDS
    finally:
        await client.close()
