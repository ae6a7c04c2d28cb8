"""The client of the model does not send a call on a connection that the model's server is about to close."""

from __future__ import annotations

import asyncio

import uvicorn

from serving.settings import UpstreamSettings
from serving.upstream import IDLE_SECONDS, Upstream


async def test_idle_connections_are_given_up_before_uvicorn_closes_them() -> None:
    client = Upstream(UpstreamSettings())
    await client.open()
    try:
        session = client._open_session()
        assert session.connector is not None
        assert session.connector._keepalive_timeout == IDLE_SECONDS
        assert uvicorn.Config(lambda: None).timeout_keep_alive > IDLE_SECONDS
    finally:
        await client.close()


async def test_a_second_try_does_not_meet_another_connection_that_the_server_has_given_up() -> None:
    """A server that answers one call of each connection, and closes it when a second comes, as one that just gave it up does."""
    together = asyncio.Event()
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        if opened >= 4:
            together.set()
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        await together.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        await reader.read(1)  # the second call, or the end
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = Upstream(UpstreamSettings(base_url=f"http://127.0.0.1:{port}/v1", retries=1, backoff=0.001))
        await client.open()
        try:
            calls = [client.call("/chat/completions", b"{}", {}) for _ in range(4)]
            assert [answer.status for answer in await asyncio.gather(*calls)] == [200] * 4
            assert (await client.call("/chat/completions", b"{}", {})).status == 200
            assert (client.retried, opened) == (1, 5)
        finally:
            await client.close()
